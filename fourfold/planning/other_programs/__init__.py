"""Read configurations of other training programs, and compare their layouts with the best layouts."""
