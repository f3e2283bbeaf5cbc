"""What a layout costs: seconds of a step by what they are spent on, and bytes of the fullest rank."""
