"""What the modules share that are settings and weights of their own, without a language model inside."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sentence_transformers.base.modules import Module

from .base import check_inside, note_requirement
from .published import Published

if TYPE_CHECKING:
    from typing_extensions import Self


class StoredModule(Module, metaclass=Published):
    """Base of the modules whose directory holds a configuration and weights, and nothing else."""

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Save settings and weights, and note in the pipeline's configuration that st_reba is needed to load it."""
        self.save_config(output_path)
        self.save_torch_weights(output_path, safe_serialization=safe_serialization)
        note_requirement(Path(output_path).parent)

    @classmethod
    def load(
        cls,
        model_name_or_path: str,
        subfolder: str = "",
        token: bool | str | None = None,
        cache_folder: str | None = None,
        revision: str | None = None,
        local_files_only: bool = False,
        init_defaults: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Load a saved module.

        Args:
            model_name_or_path: A directory or a Hub id.
            subfolder: Where in it the module lies: ``path`` in its modules.json.
            token: For the Hub.
            cache_folder: Where files of the Hub are kept.
            revision: Of a model on the Hub.
            local_files_only: Whether not to ask the Hub.
            init_defaults: Not used: a saved module says all there is to say.
            **kwargs: What else ST passes; not used.

        Raises:
            ValueError: If ``subfolder`` leads out of the model, a setting is out of range, or settings and weights do
                not fit each other.
        """
        check_inside(subfolder)
        where: dict[str, Any] = {
            "subfolder": subfolder,
            "token": token,
            "cache_folder": cache_folder,
            "revision": revision,
            "local_files_only": local_files_only,
        }
        return cls._restored(model_name_or_path, where)

    @classmethod
    def _restored(cls, model_name_or_path: str, where: dict[str, Any]) -> Self:
        """The module made from its settings, with its weights; ``where`` is for ST's loaders."""
        module = cls(**cls.load_config(model_name_or_path, **where))
        return cls.load_torch_weights(model_name_or_path, model=module, **where)
