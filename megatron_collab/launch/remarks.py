"""Console lines before the start about settings that work but waste something or have no effect."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_collab.config import Config
from megatron_collab.inference.spec import CPU_CACHE_TOKENS
from megatron_collab.launch.servers import idle_gpus
from megatron_collab.rollout.users import UserDirectory
from megatron_collab.rollout.users.llm import LlmUser
from megatron_collab.runtime import device
from megatron_collab.settings import AlgoConfig, TrainingRewardConfig, UserConfig

# Settings of algo that only algo.objective=policy reads.
_OF_POLICY_LOSS = (
    *("advantage", "loss", "average", "clip_low", "clip_high", "clip_dual", "kl", "kl_in", "entropy_coef"),
    *("correction", "later_weight", "overlong", "critic_warmup"),
)
_OF_WHOLE_CONVERSATIONS = ("turn_credit", "turn_credit_options")


def remarks(config: Config) -> list[str]:
    """Console lines before the start about settings that work but waste something."""
    on_gpus = device.select(config.launch.device).type == device.GPU
    share = config.rollout.server.memory_share
    on_cpu = f"rollout.server.memory_share={share}: is of a GPU; on the CPU a KV cache has {CPU_CACHE_TOKENS} tokens"
    lines = idle_gpus(config) if on_gpus else [on_cpu] if share and config.train.stage == "rl" else []
    return [*without_effect(config), *lines]


def without_effect(config: Config) -> list[str]:
    """Lines about algorithm settings that have no effect in this combination, each with a fix."""
    algo, defaults = config.algo, AlgoConfig()
    if config.train.stage != "rl":
        return []
    lines = _unused_turn_credit(config)
    if config.objective != "policy":
        changed = [name for name in _OF_POLICY_LOSS if getattr(algo, name) != getattr(defaults, name)]
        settings = ", ".join(f"algo.{name}={getattr(algo, name)}" for name in changed)
        unused = f"{settings}: without effect with algo.objective={algo.objective}; remove it"
        return [*lines, unused] if changed else lines
    names = [] if algo.loss == defaults.loss else ["loss"]
    names += [name for name in ("clip_low", "clip_high", "clip_dual") if getattr(algo, name) != getattr(defaults, name)]
    if algo.mini_batches * algo.epochs == 1 and names and ":" not in algo.loss:
        settings = ", ".join(f"algo.{name}={getattr(algo, name)}" for name in names)
        lines.append(
            f"{settings}: without effect, since with one update per batch every importance ratio is 1; "
            "set algo.mini_batches=2 or more, or accept the plain policy gradient"
        )
    if algo.kl == "k1" and algo.kl_in == "loss" and algo.kl_coef > 0:
        lines.append("algo.kl=k1: without effect in the loss, as its mean gradient is 0; set k3, or algo.kl_in=reward")
    return lines


def _unused_turn_credit(config: Config) -> list[str]:
    """A line about settings of turn credit, if conversations are not trained as a whole; else none."""
    reward, defaults, futures = config.reward, TrainingRewardConfig(), config.rollout.futures
    names = [name for name in _OF_WHOLE_CONVERSATIONS if getattr(reward, name) != getattr(defaults, name)]
    settings = ", ".join(f"reward.{name}={getattr(reward, name)}" for name in names)
    if not names or (reward.mode != "single_turn" and futures == 0):
        return []
    if reward.mode == "single_turn":
        return [f"{settings}: without effect with reward.mode=single_turn; remove it"]
    return [f"{settings}: without effect with rollout.futures={futures}; set rollout.futures=0, or remove it"]


def forms_without_effect(users: UserDirectory, examples: Iterable[str]) -> list[str]:
    """Lines about settings `form` of users that no language model plays. `examples`: the names of all users."""
    resolved = [users.find(name) for name in examples]
    forms = {f"users.{name}": entry["form"] for name, entry in users.named.items() if "form" in (entry or {})}
    if users.user.form != UserConfig().form:  # named users inherit it
        forms["user"] = users.user.form
    lines = []
    for group, form in forms.items():
        kinds = [user.kind for user in resolved if group in ("user", user.group)]
        if kinds and not any(issubclass(kind, LlmUser) for kind in kinds):
            lines.append(f"{group}.form={form}: without effect, since only llm users have a form; remove it")
    return lines
