"""Draws docs/figures/architecture.svg and step.svg: `python tools/figures.py`.

Plain SVG with its own background, so that both are readable on a light and on a dark page. If the reader's system is
in dark mode, so are the figures.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "figures"

_STYLE = """
  svg { --page: #ffffff; --ink: #1f2933; --soft: #52606d; --line: #7b8794; --panel: #f3f5f7;
        --blue: #dbeafe; --green: #dcf5e3; --amber: #fdefc8; --rose: #fbe0e0 }
  @media (prefers-color-scheme: dark) {
    svg { --page: #161b22; --ink: #e6edf3; --soft: #a9b4c0; --line: #8b97a3; --panel: #1f2630;
          --blue: #1d3a5f; --green: #1c4630; --amber: #54431a; --rose: #582a2a }
  }
  text { font-family: Helvetica, Arial, sans-serif; fill: var(--ink) }
  .soft { fill: var(--soft) }
  .arrow { stroke: var(--line); stroke-width: 1.6; fill: none; marker-end: url(#head) }
  .both { marker-start: url(#head) }
  .branch { stroke: var(--line); stroke-width: 1.3; fill: none }
"""
_HEAD = (
    '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto-start-reverse"><path d="M0,0 L8,4 L0,8 z" style="fill: var(--line)"/></marker></defs>'
)


class Drawing:
    """Shapes of one picture; lengths are in pixels, the origin is the upper left corner."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style>{_HEAD}",
            f'<rect width="{width}" height="{height}" rx="10" style="fill: var(--page)"/>',
        ]

    def text(self, x: float, y: float, words: str, *, size: int = 13, weight: int = 400, kind: str = "") -> None:
        """One line, centered at x; y is its base line."""
        self.parts.append(
            f'<text x="{x}" y="{y}" class="{kind}" text-anchor="middle" font-size="{size}" '
            f'font-weight="{weight}">{escape(words)}</text>'
        )

    def label(self, x: float, y: float, words: str, *, size: int = 12) -> None:
        """One line that begins at x."""
        self.parts.append(f'<text x="{x}" y="{y}" class="soft" font-size="{size}">{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, color: str, *lines: str) -> None:
        """A rectangle with centered lines, of which the first is bold."""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="7" '
            f'style="fill: var(--{color}); stroke: var(--line); stroke-width: 1"/>'
        )
        top = y + height / 2 - 9 * (len(lines) - 1) + 4.5
        for i, line in enumerate(lines):
            self.text(x + width / 2, top + 18 * i, line, weight=400 if i else 600, size=12 if i else 13)

    def panel(self, x: float, y: float, width: float, height: float, title: str) -> None:
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="10" style="fill: var(--panel)"/>'
        )
        self.text(x + width / 2, y + 24, title, size=14, weight=600, kind="soft")

    def path(self, points: str, kind: str = "arrow") -> None:
        self.parts.append(f'<path d="{points}" class="{kind}"/>')

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def architecture() -> str:
    """The processes of a run and what passes between them."""
    d = Drawing(940, 470, "Processes of a run: torchrun ranks, Ray workers, SGLang servers")
    d.panel(20, 20, 320, 300, "torchrun ranks: one SPMD program")
    d.box(45, 60, 270, 64, "blue", "Rollout manager (rank 0)", "which tasks to play, finished groups")
    d.box(45, 144, 270, 64, "blue", "Policy trainer (every rank)", "Megatron-Core: log-probs, loss, optimizer")
    d.box(45, 228, 270, 64, "blue", "Weight sync (every rank)", "which rank sends which slice, in place")

    d.panel(500, 20, 420, 300, "Ray: everything that waits")
    d.box(525, 60, 370, 64, "green", "ConversationWorker x N", "trained turn → futures, users and tools answer")
    d.box(525, 144, 370, 64, "green", "RewardWorker x M", "metrics, judges, sandboxed code")
    d.box(525, 228, 170, 64, "green", "Limiter", "rate limit, budget")
    d.box(725, 228, 170, 64, "amber", "LiteLLM endpoints", "users, judges")

    d.box(170, 376, 600, 64, "rose", "SGLang servers", "on the trainer's GPUs (colocated) or on their own")

    d.path("M318,82 L521,82")
    d.text(412, 73, "tasks, weight version", size=12, kind="soft")
    d.path("M522,104 L319,104")
    d.text(410, 122, "rollouts with rewards", size=12, kind="soft")
    d.path("M710,127 L710,141", "arrow both")
    d.path("M698,260 L722,260", "arrow both")
    d.path("M810,211 L810,225", "arrow both")
    d.path("M897,92 L909,92 L909,260 L898,260", "arrow both")
    d.path("M180,295 L180,340 L270,340 L270,372")
    d.label(186, 362, "weights")
    d.path("M522,93 L490,93 L490,340 L600,340 L600,372", "arrow both")
    d.label(608, 362, "HTTP: prompts, sampled tokens")
    return d.svg()


def step() -> str:
    """One step: a task's trained turns with their futures, and from their scores to an update."""
    d = Drawing(940, 430, "One step: trained turns, futures, rewards, advantages, update")
    columns = {"task": 90, "trained turns": 255, "futures": 440, "scores": 580, "reward": 710, "advantage": 850}
    for title, x in columns.items():
        d.text(x, 34, title, size=14, weight=600, kind="soft")
    d.box(30, 135, 120, 60, "amber", "prompt", "first messages")
    rows = (("110", "0.67", "+0.3"), ("000", "0", "-1.3"), ("111", "1", "+1.1"))  # GRPO's advantages
    for i, (scores, reward, advantage) in enumerate(rows):
        middle = 85 + i * 80
        d.path(f"M152,165 C180,165 175,{middle} 203,{middle}", "branch")
        d.box(205, middle - 18, 100, 36, "blue", f"turn {i + 1}")
        for j, score in enumerate(scores):
            y = middle + (j - 1) * 23
            d.path(f"M307,{middle} C340,{middle} 345,{y} 375,{y}", "branch")
            d.box(377, y - 9, 126, 18, "green", "")
            d.text(440, y + 4, "user · policy · user …", size=11)
            d.path(f"M505,{y} L560,{y}")
            d.text(580, y + 4, score, size=13)
        d.path(f"M597,{middle} L672,{middle}")
        d.text(634, middle - 6, "mean", size=11, kind="soft")
        d.text(710, middle + 5, reward, size=15, weight=600)
        d.path(f"M738,{middle} L796,{middle}")
        d.text(850, middle + 5, f"A = {advantage}", size=13)

    d.panel(20, 300, 545, 110, "1. Sample: optimizer offloaded, SGLang awake")
    d.box(35, 338, 118, 54, "rose", "sync weights", "version = step")
    d.box(170, 338, 118, 54, "blue", "trained turns", "prompts x group")
    d.box(305, 338, 118, 54, "green", "futures", "all at once")
    d.box(440, 338, 110, 54, "green", "score", "metrics")
    d.panel(580, 300, 340, 110, "2. Learn: SGLang asleep")
    d.box(592, 338, 98, 54, "blue", "log-probs", "old, reference")
    d.box(706, 338, 98, 54, "blue", "advantages", "per group")
    d.box(820, 338, 90, 54, "blue", "update", "mini-batches")
    for x in (153, 288, 423, 690, 804):
        d.path(f"M{x + 1},365 L{x + 15},365")
    d.path("M551,365 L590,365")
    return d.svg()


def figures() -> dict[str, str]:
    """File name in docs/figures -> its SVG."""
    return {"architecture.svg": architecture(), "step.svg": step()}


def main() -> None:
    for name, svg in figures().items():
        (FOLDER / name).write_text(svg)


if __name__ == "__main__":
    main()
