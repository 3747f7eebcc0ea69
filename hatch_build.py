"""What the wheel has beside the package: the published models and the recipes, inside of `zoo`."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class WithModelsAndRecipes(BuildHookInterface):
    """Puts both into the wheel; an editable installation has them in the checkout.

    For that one it makes `.editable/`, which holds a link to `zoo` alone, as the entry of Python's
    path. A package on the path wins over a folder of its name, such as the checkout, in the working
    directory; the hook of `editables` is asked after that folder.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before the build of a wheel: "standard" or "editable"."""
        if version == "standard":
            build_data["force_include"] |= {"models": "zoo/models", "recipes": "zoo/recipes"}
        elif version == "editable":
            link = Path(self.root, ".editable", "zoo")
            link.parent.mkdir(exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to("../zoo", target_is_directory=True)
