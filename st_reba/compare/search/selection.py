"""How much of a search's gain was selection."""

from __future__ import annotations

from dataclasses import replace

from ..results import Comparison
from .candidates import PLAIN
from .halving import Found


def with_selection(found: Found, comparison: Comparison) -> Comparison:
    """The comparison of a search's finalists on the pairs that were held out, with a word on how they were chosen.

    The best of many scores is too high: a search chooses luck, too. What it gained over the recipe without any choice
    on the pairs it chose on, less what that choice gains on the others, is about how much of it was luck.

    Args:
        found: What the search found.
        comparison: Of ``found.recipes()`` on ``found.held_out``, with ``found.chosen`` as what was chosen before.
    """
    task = comparison.tasks[0]
    scores = {
        result.name: result.scores[task.name].value for result in comparison.results if task.name in result.scores
    }
    chosen = found.chosen
    plain = PLAIN.recipe([]).result
    held = scores[chosen] - scores[plain]
    noun = found.held_out.noun
    steps = ", then ".join(f"{rung.candidates} recipes on {rung.items} {noun}" for rung in found.rungs)
    says = [
        f"The search scored {steps}, and chose {chosen}. The scores shown are of {len(found.held_out)} other {noun}, "
        + ("which it never read." if noun == "queries" else "whose texts it never read."),
    ]
    if found.finalists[0] == PLAIN:
        says.append("It found nothing better than the recipe without any choice.")
    else:
        says.append(
            f"Where it was chosen it was ahead of {plain} by {task.show(found.gain)}, on the {noun} held out by "
            f"{task.show(held)}: {task.show(found.gain - held)} of the gain was selection. With few {noun} that "
            "difference is itself uncertain; the intervals say by how much."
        )
    return replace(
        comparison,
        chosen=chosen,
        verdict=[*says, *comparison.verdict],
        settings={
            **comparison.settings,
            "searched": f"{found.rungs[0].candidates} recipes, on {len(found.chosen_on)} {noun}",
            "shown": f"{len(found.held_out)} {noun} that were held out",
        },
    )
