"""From a key press to changed pixels, as the page itself sees it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from playwright.sync_api import Locator, Page

__all__ = ["Latency", "key_to_pixels", "watch_drawing"]

# Which canvases were drawn on since the last look: comparing all of them, frame by frame, would
# take longer than what is measured.
_HOOK = """
window.drawnOn = new Set();
for (const name of ['clearRect', 'drawImage', 'fill', 'fillRect', 'fillText', 'putImageData',
                    'stroke', 'strokeRect']) {
  const plain = CanvasRenderingContext2D.prototype[name];
  CanvasRenderingContext2D.prototype[name] = function (...args) {
    window.drawnOn.add(this.canvas);
    return plain.apply(this, args);
  };
}
"""

# Times of the frames, within `wait` ms of the next key press, that show another picture than the
# frame before: other pixels on a canvas of the explorer's, or another SVG.
_WATCH = """
(explorer, wait) => {
  const canvases = [];
  const walk = node => {
    if (node.tagName === 'CANVAS' && node.width && node.height) canvases.push(node);
    if (node.shadowRoot) walk(node.shadowRoot);
    for (const child of node.children || []) walk(child);
  };
  walk(explorer);
  const pixels = canvas => new Uint32Array(
    canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.buffer);
  const same = (a, b) => {
    for (let i = 0; i < a.length; i++) if (a[i] !== b[i]) return false;
    return a.length === b.length;
  };
  const before = new Map(canvases.map(canvas => [canvas, pixels(canvas)]));
  const pictures = () => [...explorer.querySelectorAll('svg')].map(svg => svg.outerHTML).join();
  let drawn = before.size ? '' : pictures();
  window.frames_changed = new Promise(resolve => {
    window.addEventListener('keydown', () => {
      const began = performance.now(), times = [];
      window.drawnOn.clear();
      const look = () => {
        const now = performance.now() - began;
        let changed = false;
        for (const canvas of [...window.drawnOn].filter(c => before.has(c))) {
          const after = pixels(canvas);
          if (!same(before.get(canvas), after)) {
            before.set(canvas, after);
            changed = true;
          }
        }
        window.drawnOn.clear();
        if (!before.size && pictures() !== drawn) {
          drawn = pictures();
          changed = true;
        }
        if (changed) times.push(now);
        if (now > wait) resolve(times);
        else requestAnimationFrame(look);
      };
      requestAnimationFrame(look);
    }, {capture: true, once: true});
  });
}
"""


@dataclass(frozen=True)
class Latency:
    """Milliseconds to the first changed frame and to the last, key by key; medians of them."""

    first: list[float]
    last: list[float]

    @property
    def median_first(self) -> float:
        return statistics.median(self.first)

    @property
    def median_last(self) -> float:
        return statistics.median(self.last)

    def __str__(self) -> str:
        worst = max(self.last)
        return (
            f"first change {self.median_first:.0f} ms, all drawn {self.median_last:.0f} ms "
            f"(medians of {len(self.last)}; slowest {worst:.0f})"
        )


def watch_drawing(page: Page) -> None:
    """To be called before the page is opened."""
    page.add_init_script(_HOOK)


def key_to_pixels(
    page: Page, explorer: Locator, control: Locator, keys: list[str], wait_ms: float = 900.0
) -> Latency:
    """Press keys on a control, one after the other, and time the explorer's pictures.

    Two rounds of the first two keys go ahead untimed: what is made once is no matter of a step.
    """
    first, last = [], []
    for n, key in enumerate([*keys[:2], *keys[:2], *keys]):
        control.focus()
        explorer.evaluate(_WATCH, wait_ms)
        page.keyboard.press(key)
        times: list[Any] = page.evaluate("() => window.frames_changed")
        assert times, f"nothing changed within {wait_ms} ms of {key}"
        if n >= 4:
            first.append(float(times[0]))
            last.append(float(times[-1]))
    return Latency(first, last)
