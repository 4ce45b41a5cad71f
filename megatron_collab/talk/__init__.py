"""Talk with the models of a run: `session.py` serves them, with a chat each, which `worker.py` plays as rollouts are.

`chat.py` is the command in a terminal, `speaker.py` a process for the page of `view`; `serve.py` serves a model to
other programs.
"""


class ChatError(RuntimeError):
    """The chat cannot continue: it has ended, no user can write, or the model is lost; the message says what to do."""
