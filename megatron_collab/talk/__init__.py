"""Talk with the models of a run: `session.py` serves them and begins chats, which `worker.py` plays as rollouts are.

`chat.py` is the command in a terminal, `serve.py` serves a model to other programs.
"""
