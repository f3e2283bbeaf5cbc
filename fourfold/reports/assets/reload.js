// Reload the page of a run that is still training. Wait while the reader uses the page, because a reload resets the zoom.
(() => {
  let used = -Infinity;
  for (const kind of ["pointerdown", "keydown", "wheel"]) {
    addEventListener(kind, () => { used = performance.now(); }, { capture: true, passive: true });
  }
  const seconds = $seconds;
  setInterval(() => {
    if (!document.hidden && performance.now() - used > Math.max(60, seconds) * 1000) location.reload();
  }, seconds * 1000);
})();
