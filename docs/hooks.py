"""Hooks of MkDocs: links to the reference and to files outside of docs/, and the heads of pages."""

import ast
import posixpath
import re
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

# Inline code such as `zoo.fit` or `zoo.losses.next_token`, in pages and in docstrings alike.
NAME = re.compile(r"(?<!<pre>)<code>(\w+(?:\.\w+)*)(\(.*?\))?</code>(?!</a>)")
# What tests/test_docs.py is to do with a block, which MkDocs would not take for a block then.
MARK = re.compile(r"^( *```\w+) run=\"[^\"]*\"", re.MULTILINE)
# Where a page has the glossary of CONTRIBUTING.md, without the names of modules.
WORDS = "<!-- the words of CONTRIBUTING.md -->"
# A flag or a name, which docs/assets/site.css keeps on one line.
SHORT = re.compile(r"(?<!<pre>)<code>(?=[^<\s]{1,28}</code>)")
OUTSIDE = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Drop the marks, and name a file of the repository that is no page instead of a link to it."""
    root = Path(config.config_file_path).parent
    if WORDS in markdown:
        markdown = markdown.replace(WORDS, words((root / "CONTRIBUTING.md").read_text()))
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def replace(match: re.Match) -> str:
        text, target = match.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        if path.startswith("docs/") and not path.startswith("docs/examples/"):
            return match.group()
        if not (root / path).exists():
            raise PluginError(f"{page.file.src_uri}: no {path} in the repository")
        return f"{text} (`{path}` in the repository)" if text.strip("`") != path else f"`{path}`"

    return OUTSIDE.sub(replace, MARK.sub(r"\1", markdown))


def words(contributing: str) -> str:
    """The words of the table under "Words" and their meanings, as a table."""
    section = contributing.partition("\n## Words\n")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("|")]
    return "\n".join("|".join([*row[:3], ""]) for row in rows)


def on_page_content(html: str, **_: Any) -> str:
    """Link the name of a public function or class to its place in the reference."""

    def replace(match: re.Match) -> str:
        name, call = match.groups(default="")
        if name not in PUBLIC and not name.startswith("zoo."):
            return match.group()
        target = PUBLIC.get(name, name)
        return f'<autoref identifier="{target}" optional><code>{name}{call}</code></autoref>'

    return SHORT.sub('<code class="whole">', NAME.sub(replace, html))


def on_post_template(output: str, **_: Any) -> str:
    """Name the theme's search for screen readers."""
    search = 'data-md-component="search" role="dialog"'
    return output.replace(search, f'{search} aria-label="Search"')


def on_post_page(output: str, *, page: Any, config: Any, **_: Any) -> str:
    """Name the search, and the card that others show beside a link."""
    root = config.site_url or posixpath.relpath(".", posixpath.dirname(page.url) or ".") + "/"
    tags = {
        "og:title": page.title if page.is_homepage else f"{page.title} – {config.site_name}",
        "og:description": config.site_description,
        "og:image": f"{root}assets/card.png",
        "og:image:alt": "zoo: sharded reference models in Equinox and JAX",
        "twitter:card": "summary_large_image",
    }
    lines = [f'<meta property="{k}" content="{escape(v)}">' for k, v in tags.items()]
    output = on_post_template(output)
    return output.replace("</head>", "\n".join(lines) + "</head>", 1)


def _public() -> dict[str, str]:
    """The public names that docstrings use without `zoo.`, and that are no plain words."""
    path = Path(__file__).parent.parent / "zoo" / "__init__.py"
    imports = [x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.ImportFrom)]
    names = {alias.name for node in imports for alias in node.names if alias.asname}
    return {name: f"zoo.{name}" for name in names if "_" in name or name[0].isupper()}


PUBLIC = _public()
