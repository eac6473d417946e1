"""Model cards of saved models: the card data of sentence-transformers with the template assets/MODEL_CARD.md."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData, metadata_load, model_info, try_to_load_from_cache
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.model_card import BaseModelCardData
from sentence_transformers.base.modules import Transformer
from sentence_transformers.multi_vector_encoder import MultiVectorEncoderModelCardData
from sentence_transformers.sentence_transformer.model_card import SentenceTransformerModelCardData

from ..version import __version__

_ASSETS = Path(__file__).parents[1] / "assets"
TEMPLATE = _ASSETS / "MODEL_CARD.md"
# Template for static models, which do not need st_reba.
STATIC_TEMPLATE = _ASSETS / "STATIC_CARD.md"
# Texts that the Hub's page of a model compares.
_WIDGET: dict[str, Any] = {
    "source_sentence": "The bank raised its rates.",
    "sentences": ["Borrowing became more expensive.", "They walked along the bank of the river.", "银行提高了利率。"],
}

# Seconds to wait for the Hub, which is asked for the licence of a base model.
_HUB_TIMEOUT = 5
_COST = "One pass over a text and its prompts: for long texts as the classical embedding."
_COPIES_COST = "One pass over {0} copies of a text and its prompts: for long texts {0} times the classical embedding."
# Characters of a line in the description of a model's architecture.
_LONGEST_LINE = 2000


class _OurCardData(BaseModelCardData):
    """Mixin that adds the values of our template to the card data of a family of models.

    It comes before that family's dataclass in a list of bases, and adds no fields.
    """

    #: Path or Hub id of the language model.
    origin: str = ""
    #: Values for the template of a static model.
    made: Mapping[str, Any] = {}
    #: Scores of the recipe and of others: ``answer``, ``note``, ``columns``, ``rows`` (each a name and as many cells)
    #: and ``verdict``, the sentences below; ``head``, the head of the names, if it is not "recipe".
    comparison: Mapping[str, Any] | None = None
    recipe: Mapping[str, str] | None = None

    @property
    def _module(self) -> Any:
        """First module of the model if it is ours, else None."""
        return self.model[0] if self.model is not None and _is_ours(self.model) else None

    def register_model(self, model: Any) -> None:
        super().register_model(model)
        if _is_ours(model):
            self.template_path = TEMPLATE
            self.origin = model[0].model.config._name_or_path
            # ST would run the backbone for an example, which takes minutes for a 7B model.
            self.generate_widget_examples = False
            if self.pipeline_tag == "sentence-similarity":
                self.widget = self.widget or [_WIDGET]
            self.add_tags(["st-reba", model[0].method.lower().replace(" ", "-")])

    def add_tags(self, tags: str | list[str]) -> None:
        super().add_tags(tags)
        if self._was_trained and self._module is None:
            # ST's template reports the training, which to_dict adds to ours.
            self.template_path = type(self).template_path

    @property
    def _was_trained(self) -> bool:
        return "generated_from_trainer" in (self.tags or [])

    def to_dict(self) -> dict[str, Any]:
        """Return the template's values, which for a trained model include the training section of ST's card."""
        values: dict[str, Any] = super().to_dict()
        if self._was_trained and self.template_path == TEMPLATE:
            # In place, as ST reads this dictionary again.
            values["training_details"] = _training_details(type(self).template_path, values)
        return values

    def try_to_set_base_model(self) -> None:
        """Set the base model, its licence and its languages. ST calls this to write a card, and ignores errors."""
        super().try_to_set_base_model()
        if not self.origin:
            return
        if self.base_model is None and _cached(self.origin, "config.json") is not None:
            # A cached backbone came from the Hub, also if the Hub does not answer.
            self.base_model = self.origin
        card = self._base_card()
        self.license = self.license or card.license
        if card.language and not self.language:
            self.set_language(card.language)

    def _base_card(self) -> ModelCardData:
        """Return the metadata of the base model's card: next to its weights, in the Hub's cache, or on the Hub."""
        path = Path(self.origin, "README.md") if Path(self.origin).is_dir() else _cached(self.origin, "README.md")
        if path is not None and path.is_file():
            # ModelCard.load would log a warning for a README without metadata.
            return ModelCardData(**(metadata_load(path) or {}), ignore_metadata_errors=True)
        if self.base_model is None or self.local_files_only:
            return ModelCardData()
        return model_info(self.base_model, timeout=_HUB_TIMEOUT).card_data or ModelCardData()

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
        prompts = self.model.prompts
        layouter = getattr(module, "layouter", None)
        copies = [1] if layouter is None else [template.copies for template in layouter.templates]
        saved = [key for key in module.get_config_dict() if key not in Transformer.config_keys]
        return {
            **metadata,
            "method": module.method,
            "equation": module.equation,
            "cost": module.cost or (_COST if sum(copies) == 1 else _COPIES_COST.format(sum(copies))),
            "recipe": self.recipe,
            "method_citation": self.recipe["citation"] if self.recipe else module.citation,
            # A class of another package is registered by importing that package.
            "package": type(module).__module__.partition(".")[0],
            "module_class": f"{type(module).__module__}.{type(module).__name__}",
            "settings": {key: _code(getattr(module, key)) for key in saved},
            "pipeline": " → ".join(type(part).__name__ for part in self.model.children()),
            "backbone": type(module.model).__name__,
            "copies": copies[0],
            # ST has both roles in every model, with empty prompts by default.
            "role_prompts": {role: _code(prompts[role]) for role in ("query", "document") if prompts.get(role)},
            "towers": hasattr(module, "towers"),
            "comparison": self.comparison,
            "model_string": _shorten(metadata["model_string"]),
            "model_class": type(self.model).__name__,
            "trained": self._was_trained,
            "multi_vector": isinstance(self, MultiVectorEncoderModelCardData),
            "words": getattr(module, "rows", "all") == "all" and getattr(module, "has_token_vectors", True),
            "skips": any(getattr(part, "skiplist_words", None) for part in self.model.children()),
        }


class STRebaCardData(_OurCardData, SentenceTransformerModelCardData):
    """Card data of models with one vector for each text."""


class MultiVectorCardData(_OurCardData, MultiVectorEncoderModelCardData):
    """Card data of models with several vectors for each text."""


#: Our card data by those of ST for each family of models.
_OURS: dict[type[Any], type[Any]] = {
    SentenceTransformerModelCardData: STRebaCardData,
    MultiVectorEncoderModelCardData: MultiVectorCardData,
}


def adopt(model: Any) -> Any:
    """Replace a model's card data by ours with the same values, and return them."""
    ours = _OURS.get(type(model.model_card_data))
    if ours is not None:
        card_data = ours()
        for field in fields(model.model_card_data):
            setattr(card_data, field.name, getattr(model.model_card_data, field.name))
        card_data.register_model(model)
        model.model_card_data = card_data
    return model.model_card_data


def add_recipe(model: Any, recipe: Any) -> None:
    """Add the recipe of a model to its card.

    Args:
        model: Model whose first module is ours.
        recipe: Its :class:`st_reba.recipes.Recipe`.
    """
    names = {"name": recipe.name, "key": recipe.key, "description": recipe.description}
    adopt(model).recipe = {**names, "citation": recipe.row.citation}


def add_static(model: SentenceTransformer, made_of: Any, layer: int, depth: int, texts: int) -> None:
    """Give a static model a card that describes its origin.

    Args:
        model: Static model.
        made_of: The language model.
        layer: Layer whose outputs are the tokens' vectors, or 0 for the input embeddings.
        depth: Number of layers of the language model.
        texts: Number of texts that the model was fitted on.
    """
    data = STRebaCardData()
    data.register_model(model)
    data.template_path = STATIC_TEMPLATE
    data.generate_widget_examples = False
    data.origin = made_of.config._name_or_path
    data.made = {"layer": layer, "depth": depth, "fit_texts": texts}
    data.add_tags(["st-reba", "static"])
    model.model_card_data = data


def _training_details(template: Path, values: Mapping[str, Any]) -> str:
    """Return the section on training of a template, rendered, or an empty string if it has none."""
    heading = "## Training Details"
    _, line, rest = template.read_text(encoding="utf-8").partition(f"\n{heading}\n")
    if not line:
        return ""
    # huggingface_hub renders templates with it, too.
    from jinja2 import Template

    text, _, _ = rest.partition("\n## ")
    return str(Template(f"{heading}\n{text}").render(**values)).strip()


def _cached(name: str, file: str) -> Path | None:
    """Return the cached path of a file of a model on the Hub, or None if there is none."""
    if Path(name).exists() or name.count("/") != 1:
        return None
    path = try_to_load_from_cache(name, file)
    return Path(path) if isinstance(path, str) else None


def _code(value: object) -> str:
    """Return a value as Markdown code on one line, which is safe in a table. An empty value stays empty."""
    raw = value if isinstance(value, str) else repr(value)
    text = "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in raw)
    text = text.replace("|", "\\|")
    if "`" in text:
        fence = "`" * (1 + max(map(len, re.findall("`+", text))))
        return f"{fence} {text} {fence}"
    return f"`{text}`" if text else ""


def _shorten(text: str) -> str:
    """Shorten the lines of a text, which may list the thousands of tokens of a mask."""
    lines = (line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]} ..." for line in text.splitlines())
    return "\n".join(lines)


def _is_ours(model: Any) -> bool:
    return hasattr(type(model[0]), "equation")
