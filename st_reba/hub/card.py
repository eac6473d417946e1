"""The model card that a saved model gets: ST's card data, our template (MODEL_CARD.md)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData, metadata_load, model_info, try_to_load_from_cache
from huggingface_hub.repocard_data import eval_results_to_model_index
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.model_card import BaseModelCardData
from sentence_transformers.base.modules import Transformer
from sentence_transformers.multi_vector_encoder import MultiVectorEncoderModelCardData
from sentence_transformers.sentence_transformer.model_card import SentenceTransformerModelCardData

from ..version import __version__

if TYPE_CHECKING:
    from mteb.results import TaskResult

_PACKAGED = Path(__file__).parents[1] / "assets" / "MODEL_CARD.md"
# In an editable install the template lies where it is kept: beside the package.
TEMPLATE = _PACKAGED if _PACKAGED.is_file() else Path(__file__).parents[2] / "MODEL_CARD.md"

# Of models that need nothing of ours.
STATIC_TEMPLATE = Path(__file__).parents[1] / "assets" / "STATIC_CARD.md"

# Seconds that a card waits for the Hub to say what a base model's licence is.
_HUB_PATIENCE = 5
# Characters of a line of a model's architecture.
_LONGEST_LINE = 2000


class _OurCardData(BaseModelCardData):
    """What our template needs, on top of the card data that ST has for a family of models.

    A class lists it before that family's dataclass; it adds no field of a dataclass.
    """

    #: The path or Hub id of the language model that it was made of.
    origin: str = ""
    #: Of a static model, what its template says of how it was made.
    made: Mapping[str, Any] = {}
    mteb_results: Sequence[EvalResult] = ()
    #: The scores of the model's recipe and of its controls, as the template shows them: ``answer``, ``data``,
    #: ``date``, ``command``, ``columns``, ``rows`` (each a list as long as ``columns``, behind the
    #: row's name) and ``verdict``.
    comparison: Mapping[str, Any] | None = None
    recipe: Mapping[str, str] | None = None

    @property
    def _module(self) -> Any:
        """The model's first module if that is ours, else None."""
        return self.model[0] if self.model is not None and _is_ours(self.model) else None

    def register_model(self, model: Any) -> None:
        super().register_model(model)
        if _is_ours(model):
            self.template_path = TEMPLATE
            self.origin = model[0].model.config._name_or_path
            # ST would run the backbone to fill in an example: minutes, for a 7B model that is only being saved.
            self.generate_widget_examples = False
            self.add_tags(["st-reba", model[0].method.lower().replace(" ", "-")])

    def add_tags(self, tags: str | list[str]) -> None:
        super().add_tags(tags)
        if self._was_trained and self._module is None:
            # ST's own card reports the training. Of ours, to_dict adds that section.
            self.template_path = type(self).template_path

    @property
    def _was_trained(self) -> bool:
        return "generated_from_trainer" in (self.tags or [])

    def to_dict(self) -> dict[str, Any]:
        """What a template is filled with. For a trained model ours also gets the training section of ST's card."""
        found: dict[str, Any] = super().to_dict()
        if self._was_trained and self.template_path == TEMPLATE:
            # In the same object, which ST looks up once more.
            found["training_details"] = _section("## Training Details", type(self).template_path, found)
        return found

    def try_to_set_base_model(self) -> None:
        """Called by ST when it writes a card; an error here does not keep it from that."""
        super().try_to_set_base_model()
        if not self.origin:
            return
        if self.base_model is None and _cached(self.origin, "config.json") is not None:
            # The Hub cannot be asked, but its cache shows that the backbone came from there.
            self.base_model = self.origin
        card = self._base_card()
        self.license = self.license or card.license
        if card.language and not self.language:
            self.set_language(card.language)

    def _base_card(self) -> ModelCardData:
        """The base model's card: beside its weights, in the Hub's cache, or on the Hub if that answers."""
        path = Path(self.origin, "README.md") if Path(self.origin).is_dir() else _cached(self.origin, "README.md")
        if path is not None and path.is_file():
            # Not ModelCard.load, which logs a warning for a README that has no metadata.
            return ModelCardData(**(metadata_load(path) or {}), ignore_metadata_errors=True)
        if self.base_model is None or self.local_files_only:
            return ModelCardData()
        return model_info(self.base_model, timeout=_HUB_PATIENCE).card_data or ModelCardData()

    def get_model_specific_metadata(self) -> dict[str, Any]:
        module = self._module
        metadata = {
            **super().get_model_specific_metadata(),
            **self.made,
            "base_name": _code(self.base_model or Path(self.origin).name),
            "licence": _code(self.license or ""),
            "st_reba_version": __version__,
        }
        if self.model is None or module is None:
            return metadata
        prompts = {role: self.model.prompts.get(role) for role in ("query", "document")}
        # Settings as they are saved: one that is not saved, because it is at its default, is not shown.
        shown = [key for key in module.get_config_dict() if key not in Transformer.config_keys]
        return {
            **metadata,
            **self._evaluation(),
            "method": module.method,
            "equation": module.equation,
            "cost": module.cost,
            "recipe": self.recipe,
            "method_citation": self.recipe["citation"] if self.recipe else module.citation,
            # Another package's class is made known by importing that package, which imports st_reba.
            "package": type(module).__module__.partition(".")[0],
            "module_class": f"{type(module).__module__}.{type(module).__name__}",
            "settings": {key: _code(getattr(module, key)) for key in shown},
            "pipeline": " → ".join(type(part).__name__ for part in self.model.children()),
            "backbone": type(module.model).__name__,
            "copies": module.copies,
            # ST has both names in every model, empty where there is no prompt.
            "role_prompts": {role: _code(prompt) for role, prompt in prompts.items() if prompt},
            "towers": hasattr(module, "towers"),
            "comparison": self.comparison,
            "model_string": _shortened(metadata["model_string"]),
            "model_class": type(self.model).__name__,
            "trained": self._was_trained,
            "multi_vector": isinstance(self, MultiVectorEncoderModelCardData),
            # Both towers hand on the tokens of a text; a language model's module may read something else.
            "words": getattr(module, "rows", "all") == "all" and not getattr(module, "no_chunks", ""),
            "skips": any(getattr(part, "skiplist_words", None) for part in self.model.children()),
        }

    def _evaluation(self) -> dict[str, Any]:
        """mteb's scores for the front matter, together with those of ST's evaluators."""
        if not self.mteb_results:
            return {}
        name = self.model_name or self.get_default_model_name()
        index = eval_results_to_model_index(name, list(self.mteb_results))
        if not self.eval_results_dict:
            return {"model-index": index}
        formatted = self.format_eval_metrics()
        formatted["model-index"][0]["results"] += index[0]["results"]
        return formatted


class STRebaCardData(_OurCardData, SentenceTransformerModelCardData):
    """ST's card data with what our template asks for besides. For models without our modules it is ST's own."""


class MultiVectorCardData(_OurCardData, MultiVectorEncoderModelCardData):
    """The same for models that give a text several vectors."""


#: Ours, by the card data that ST gives a model of each family.
_OURS: dict[type[Any], type[Any]] = {
    SentenceTransformerModelCardData: STRebaCardData,
    MultiVectorEncoderModelCardData: MultiVectorCardData,
}


def adopt(model: Any) -> Any:
    """Give a complete model our card data, keeping all that is in the one it has, and return it."""
    ours = _OURS.get(type(model.model_card_data))
    if ours is not None:
        card_data = ours()
        for field in fields(model.model_card_data):
            setattr(card_data, field.name, getattr(model.model_card_data, field.name))
        card_data.register_model(model)
        model.model_card_data = card_data
    return model.model_card_data


def take_training(model: SentenceTransformer, trained: SentenceTransformer) -> None:
    """Put onto a model's card what the trainer noted of another, its part or the one it was made from."""
    model.model_card_data = trained.model_card_data
    model.model_card_data.register_model(model)
    adopt(model)


def add_recipe(model: Any, name: str, key: str, says: str, citation: str) -> None:
    """Put the recipe that a model was built by onto its card.

    Args:
        model: Whose first module is ours.
        name: As tables show it.
        key: As ``st-reba build --recipe`` takes it.
        says: What it does, in a sentence.
        citation: Who it is from.
    """
    adopt(model).recipe = {"name": name, "key": key, "says": says, "citation": citation}


def add_static(model: SentenceTransformer, made_of: Any, layer: int, depth: int, texts: int) -> None:
    """Give a static model a card that says what it was made of.

    Args:
        model: ``StaticEmbedding`` and ``Normalize``.
        made_of: The language model.
        layer: After which of its layers tokens were read; 0: before the first.
        depth: How many it has.
        texts: How many texts it was fitted on.
    """
    data = STRebaCardData()
    data.register_model(model)
    data.template_path = STATIC_TEMPLATE
    data.generate_widget_examples = False
    data.origin = made_of.config._name_or_path
    data.made = {"layer": layer, "depth": depth, "fit_texts": texts}
    data.add_tags(["st-reba", "static"])
    model.model_card_data = data


def add_mteb_results(model: SentenceTransformer, results: Iterable[TaskResult]) -> None:
    """Put mteb's scores into the front matter of a model's card, which its next save or push writes.

    Args:
        model: Any model whose first module is ours. If it was loaded, the card that it came with is kept, with the
            scores added; scores of the same task, split and subset are replaced.
        results: What ``mteb.evaluate`` returned, or any ``TaskResult`` objects.

    Raises:
        ValueError: If the model's first module is not ours.
    """
    if not _is_ours(model):
        raise ValueError(
            f"{type(model[0]).__name__} is not a module of st_reba, so its card is not written here: "
            "use mteb's or sentence-transformers' own means."
        )
    data = adopt(model)
    added = [entry for result in results for entry in _eval_results(result)]
    # Private in ST: the card that a model was loaded with, which ST writes again as it is.
    if text := model._model_card_text:
        card = ModelCard(text, ignore_metadata_errors=True)
        card.data.model_name = card.data.model_name or type(model).__name__
        card.data.eval_results = _replaced(card.data.eval_results or [], added)
        model._model_card_text = str(card)
    else:
        data.mteb_results = _replaced(data.mteb_results, added)


def _eval_results(result: TaskResult) -> list[EvalResult]:
    """One for each split and subset, in the words that MTEB's leaderboard looks for."""
    task = result.task.metadata
    return [
        EvalResult(
            task_type=task.type,
            dataset_type=task.dataset["path"],
            dataset_name=f"MTEB {result.task_name}",
            dataset_config=scores.get("hf_subset", "default"),
            dataset_split=split,
            dataset_revision=result.dataset_revision,
            metric_type=task.main_score,
            metric_value=scores["main_score"],
        )
        for split, subsets in result.scores.items()
        for scores in subsets
    ]


def _section(heading: str, template: Path, values: Mapping[str, Any]) -> str:
    """One section of a template, filled; empty where the template has none of that heading."""
    _, found, rest = template.read_text(encoding="utf-8").partition(f"\n{heading}\n")
    if not found:
        return ""
    # As huggingface_hub does, which fills the template itself.
    from jinja2 import Template

    text, _, _ = rest.partition("\n## ")
    return str(Template(f"{heading}\n{text}").render(**values)).strip()


def _replaced(old: Sequence[EvalResult], new: list[EvalResult]) -> list[EvalResult]:
    again = {(result.unique_identifier, result.metric_type) for result in new}
    return [result for result in old if (result.unique_identifier, result.metric_type) not in again] + new


def _cached(name: str, file: str) -> Path | None:
    """Where a file of a model on the Hub lies in the cache, if ``name`` is such a model's id and it is there."""
    if Path(name).exists() or name.count("/") != 1:
        return None
    found = try_to_load_from_cache(name, file)
    return Path(found) if isinstance(found, str) else None


def _code(value: object) -> str:
    """What others wrote, for a sentence or a table: as code, on one line, with no bar that would end a cell.

    Nothing stays nothing.
    """
    given = value if isinstance(value, str) else repr(value)
    text = "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in given)
    text = text.replace("|", "\\|")
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if len(fence) > 1 else f"`{text}`" if text else ""


def _shortened(text: str) -> str:
    """A text whose lines end somewhere: the tokens that a mask leaves out are thousands."""
    lines = (line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]} ..." for line in text.splitlines())
    return "\n".join(lines)


def _is_ours(model: Any) -> bool:
    return hasattr(type(model[0]), "equation")
