"""A Bokeh figure on the page whose changes travel as one message, and are not sent back.

jupyter_bokeh sends each change of a model as a message of its own, and its page answers each
with the same change (it does not look at the event's `sync`, by which Bokeh tells the kernel's
changes from the reader's). One step of a slider changes tens of properties: the answers alone
take longer than the picture, and one that comes late would write an old value over a new one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from bokeh.core.serialization import Serializer
from bokeh.models import CustomJS, Plot
from bokeh.protocol.messages.patch_doc import patch_doc
from jupyter_bokeh import BokehModel

__all__ = ["LiveFigure"]

# Runs when the figure has been laid out, by when all listeners are there. Where Bokeh keeps its
# listeners elsewhere, nothing happens, and changes are sent back as before.
_NO_ANSWERS = """
const listeners = cb_obj.document?._callbacks;
if (listeners instanceof Map) {
  for (const [listener, batches] of [...listeners]) {
    if (listener.of_reader) continue;
    const own = (event) => { if (event.sync !== false) listener(event); };
    own.of_reader = true;
    listeners.delete(listener);
    listeners.set(own, batches);
  }
}
"""


# Each longer array is sent as a message of its own, which costs less than writing it as text.
_INLINE_BYTES = 2**15


class _Compact(Serializer):
    """Short arrays stand in the message itself, as text."""

    def _encode_bytes(self, obj: Any) -> Any:
        self._deferred = memoryview(obj).nbytes > _INLINE_BYTES
        return super()._encode_bytes(obj)


class LiveFigure(BokehModel):
    """The widget of one Bokeh model."""

    _held: list[Any] | None = None

    def __init__(self, model: Any) -> None:
        for figure in model.select({"type": Plot}):
            figure.js_on_change("inner_width", CustomJS(code=_NO_ANSWERS))
        super().__init__(model)

    def pack(self) -> None:
        """Pack the figure anew, as it is now, for a view that is about to be made."""
        self.render_bundle = self._model_to_traits(self._model)

    @contextlib.contextmanager
    def one_message(self) -> Iterator[None]:
        """Within, changes wait; at the end, all travel at once. It may be nested."""
        if self._held is not None:
            yield
            return
        self._held = []
        try:
            yield
        finally:
            held, self._held = self._held, None
            if held:
                self._post(held)

    def _document_patched(self, event: Any) -> None:
        if event.setter is self:
            return
        if self._held is None:
            self._post([event])
        else:
            self._held.append(event)

    def _post(self, events: Sequence[Any]) -> None:
        models = self._document.models
        serializer = _Compact(references=models.synced_references)
        content: Any = {"events": serializer.encode(list(events))}
        models.flush_synced(lambda model: not serializer.has_ref(model))
        message = patch_doc(patch_doc.create_header(), {}, content)
        message.add_buffers(*serializer.buffers)
        parts = [message.header_json, message.metadata_json, message.content_json]
        for text in parts:
            self.send({"msg": "patch", "payload": text})
        for buffer in message.buffers:
            self.send({"msg": "patch", "payload": f'{{"id": "{buffer.id}"}}'})
            self.send({"msg": "patch"}, [buffer.to_bytes()])
