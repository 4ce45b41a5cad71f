"""Checks of the teacher of on-policy distillation before any process starts; each raises a ConfigError of one line."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path

from megatron_collab.algo.teacher_prompts import teacher_prompt
from megatron_collab.config import Config
from megatron_collab.data import chat_template
from megatron_collab.inference.client import EngineError
from megatron_collab.inference.teacher import ServedTeacher
from megatron_collab.models import hf_weights
from megatron_collab.models.hf_config import ModelShape, shape_of_setting
from megatron_collab.runtime import hub
from megatron_collab.settings import ConfigError, Shown, require
from megatron_collab.settings.schema import TeacherConfig

SETTING = "algo.teacher.model"
_SECONDS = 30.0  # for an answer of a teacher's server before the start


def check_settings(config: Config) -> None:
    """The checks that need neither a model nor this machine. Raises ConfigError."""
    shown, teacher = Shown(config).algo.teacher, config.algo.teacher
    defaults = asdict(TeacherConfig())
    changed = next((name for name, value in asdict(teacher).items() if value != defaults[name]), None)
    if not teacher.weight:
        message = "without effect, since there is no teacher; set algo.teacher.weight above 0"
        require(changed is None, f"{getattr(shown, changed or 'weight')}: {message}")
        return
    learns = Shown(config).algo.objective if config.train.stage == "rl" else Shown(config).train.stage
    message = f"{shown.weight}: a teacher is part of the policy loss, which {learns} does not have; set it to 0"
    require(config.objective == "policy", message)
    message = f"{shown.server}: {shown.model} names another teacher; remove one"
    require(not teacher.server or teacher.model == defaults["model"], message)
    message = f"{shown.model}: such a teacher equals the policy; set algo.teacher.context, or another model or server"
    require(teacher.place in ("model", "server") or teacher.context is not None, message)
    # SGLang gives the log-probs of given tokens at temperature 1.
    message = f"{shown.server}: its log-probs are those at temperature 1; set rollout.turn.temperature=1"
    require(not teacher.server or config.rollout.turn.temperature == 1, message)
    message = f"{Shown(config).algo.dynamic_sampling}: drops groups of equal rewards, from which the teacher of"
    require(config.algo.dynamic_sampling == 0, f"{message} {shown.weight} teaches as well; set it to 0")
    message = f"{shown.prompt}: without effect, as the teacher's prompt is the policy's; set algo.teacher.context"
    require(teacher.prompt is None or teacher.context is not None, message)
    if teacher.context is None:
        return
    teacher_prompt(teacher)
    message = f"{shown.context}: needs conversations of one token sequence; set rollout.strip_thoughts=false"
    require(not config.rollout.strip_thoughts, message)
    single_turn = config.reward.mode == "single_turn"
    setting = Shown(config).reward.mode if single_turn else Shown(config).rollout.max_assistant_turns
    users_answer = not single_turn and config.rollout.max_assistant_turns > 1
    message = f"{shown.context}: with {setting} no user answers; choose goal or answer"
    require(teacher.context != "next_message" or users_answer, message)
    message = f"{shown.context}: {Shown(config).parallel.cp} cuts the teacher's sequences at other places"
    whole = config.parallel.cp == 1 or not teacher.full
    require(whole, f"{message}; set algo.teacher.kl=sampled, or parallel.cp=1")


def check_server(config: Config) -> None:
    """Checks that the server answers, and that its vocabulary is the policy's. Raises ConfigError."""
    url, tokenizer = config.algo.teacher.server, chat_template.load_tokenizer(config.model.path, "model.path")
    assert url is not None
    added, decode = [*tokenizer.added_tokens_decoder], partial(tokenizer.decode, skip_special_tokens=False)
    setting = Shown(config).algo.teacher.server
    try:
        fault = ServedTeacher(url, _SECONDS).fault(tokenizer.get_vocab(), added, decode)
    except EngineError as error:
        raise ConfigError(f"{setting}: {error}; start an SGLang server there, or give another address") from error
    require(fault is None, f"{setting}: {fault}; give a teacher with the policy's vocabulary")


def read_shape(config: Config, described: Path | None = None) -> ModelShape:
    """The shape of a teacher with weights of its own, from its config.json or from the file `described`.

    Raises ConfigError.
    """
    return shape_of_setting(SETTING, config.algo.teacher.model, described, ", or reference or policy")


def check_files(config: Config) -> None:
    """Checks the teacher's weights and its vocabulary, which must be the policy's. Raises ConfigError."""
    path = config.algo.teacher.model
    try:
        hf_weights.model_tensors(hub.folder(path), read_shape(config))
        vocabulary = chat_template.load_tokenizer(path, SETTING).get_vocab()
        policy = chat_template.load_tokenizer(config.model.path, "model.path").get_vocab()
    except (ValueError, OSError) as error:
        raise ConfigError(f"{SETTING}={path}: {error}") from error
    token, number = next(((token, n) for token, n in policy.items() if vocabulary.get(token) != n), ("", 0))
    difference = f"lacks {token!r}" if token not in vocabulary else f"gives {token!r} the id {vocabulary[token]}"
    message = f"its tokenizer {difference}, and the policy's gives it {number}"
    out = "give a teacher with the policy's vocabulary"
    require(policy.items() <= vocabulary.items(), f"{SETTING}={path}: {message}; {out}")
