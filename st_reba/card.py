"""The model card that a saved model gets: ST's card data, our template (MODEL_CARD.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.model_card import SentenceTransformerModelCardData

from .version import __version__

_PACKAGED = Path(__file__).parent / "assets" / "MODEL_CARD.md"
# In an editable install the template lies where it is kept: beside the package.
TEMPLATE = _PACKAGED if _PACKAGED.is_file() else Path(__file__).parent.parent / "MODEL_CARD.md"

_ST_TEMPLATE = SentenceTransformerModelCardData().template_path


class STRebaCardData(SentenceTransformerModelCardData):
    """ST's card data with what our template asks for besides. For models without our modules it is ST's own."""

    def register_model(self, model: Any) -> None:
        super().register_model(model)
        if _is_ours(model):
            self.template_path = TEMPLATE
            # ST would run the backbone to fill in an example: minutes, for a 7B model that is only being saved.
            self.generate_widget_examples = False
            self.add_tags(["st-reba", model[0].method.lower().replace(" ", "-")])

    def add_tags(self, tags: str | list[str]) -> None:
        super().add_tags(tags)
        if "generated_from_trainer" in self.tags:
            # Then there is training to report, which ST's own card does.
            self.template_path = _ST_TEMPLATE

    def get_model_specific_metadata(self) -> dict[str, Any]:
        metadata = super().get_model_specific_metadata()
        if self.model is None or not _is_ours(self.model):
            return metadata
        module: Any = self.model[0]
        shown = [key for key in module.config_keys if key not in Transformer.config_keys]
        return {
            **metadata,
            "method": module.method,
            "equation": module.equation,
            "method_citation": module.citation,
            "module_class": type(module).__name__,
            "settings": {key: getattr(module, key) for key in shown},
            "pipeline": " → ".join(type(part).__name__ for part in self.model.children()),
            "backbone": type(module.model).__name__,
            "base_name": self.base_model or Path(module.model.config._name_or_path).name or None,
            "copies": module.copies,
            "st_reba_version": __version__,
        }


def adopt(model: Any) -> None:
    """Give a complete model our card data, keeping all that is in the one it has."""
    if type(model.model_card_data) is not SentenceTransformerModelCardData:
        return
    card_data = STRebaCardData.__new__(STRebaCardData)
    card_data.__dict__.update(vars(model.model_card_data))
    card_data.register_model(model)
    model.model_card_data = card_data


def _is_ours(model: Any) -> bool:
    return hasattr(type(model[0]), "equation")
