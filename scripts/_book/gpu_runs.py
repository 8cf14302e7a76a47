"""The scoreboard of public GPU runs, for the page of results: a picture and a table."""

from html import escape
from pathlib import Path

PICTURE = "gpu_runs.png"


def on_page(site: Path) -> str:
    """Markdown of the picture, which is written into the site, and of the table."""
    from labs.scaling.scoreboard_charts import picture_of, scoreboard

    picture, board = picture_of(scoreboard()), scoreboard()
    site.mkdir(parents=True, exist_ok=True)
    (site / PICTURE).write_bytes(picture.png())
    alt = escape(picture.text.replace("\n", "; "), quote=True)
    tables = [_table(board, quantity) for quantity in ("seconds", "memory")]
    return "\n".join([f'<img src="{PICTURE}" alt="{alt}" class="picture">', "", *tables])


def _table(board, quantity) -> str:
    """A table of the groups of rows in which this was measured."""
    groups = {group: board.scores(kind, group) for kind, group in board.groups()
              if kind == quantity}
    others = list(dict.fromkeys(name for scores in groups.values() for name in scores))[1:]
    heads = [quantity.capitalize() + " of", "Rows", "Median error", "Bias", "In the interval",
             *(name[0].upper() + name[1:] for name in others)]
    rows = [[group, *_ours(scores["this planner"]), *(_median(scores, name) for name in others)]
            for group, scores in groups.items()]
    lines = [heads, [":--"] + ["--:"] * (len(heads) - 1), *rows]
    # a number and its % stay on one line
    return "\n".join(["| " + " | ".join(line).replace(" %", "\u00a0%") + " |" for line in lines]
                     + [""])


def _ours(score) -> list[str]:
    return [str(score.rows), f"{score.median:.1f} %", f"{score.bias:+.1f} %".replace("-", "−"),
            f"{100 * score.held:.0f} %"]


def _median(scores, name) -> str:
    return f"{scores[name].median:.0f} %" if name in scores else "–"
