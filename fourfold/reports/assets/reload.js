// Reload the page of a run that is still training. Wait while the reader uses the page, because a reload resets the zoom.
// A killed run never writes its last page. So stop if nothing has rewritten the page for long.
(() => {
  let used = -Infinity;
  for (const kind of ["pointerdown", "keydown", "wheel"]) {
    addEventListener(kind, () => { used = performance.now(); }, { capture: true, passive: true });
  }
  const seconds = $seconds, written = $written;
  let timer = 0;
  const check = () => {
    const age = Date.now() / 1000 - written;
    if (age > Math.max(3600, 10 * seconds)) {
      clearInterval(timer);
      const subtitle = document.querySelector(".subtitle");
      subtitle.textContent = subtitle.textContent.replace(/Training continues.*/, "Nothing has rewritten this page for "
        + Math.round(age / 3600) + " h, so it no longer reloads itself. Either a step takes this long, or the run was "
        + "killed. The command fourfold report writes the page of all recorded steps.");
    } else if (timer && !document.hidden && performance.now() - used > Math.max(60, seconds) * 1000) location.reload();
  };
  check();
  timer = setInterval(check, seconds * 1000);
})();
