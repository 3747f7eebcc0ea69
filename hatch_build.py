"""What the wheel has beside the package: the published models and the recipes, inside of `zoo`."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class WithModelsAndRecipes(BuildHookInterface):
    """Puts both into the wheel; an editable installation has them in the checkout."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before the build of a wheel: "standard" or "editable"."""
        if version == "standard":
            build_data["force_include"] |= {"models": "zoo/models", "recipes": "zoo/recipes"}
