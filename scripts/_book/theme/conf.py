"""Sphinx's configuration of the book; `_book.site` copies it beside the staged pages."""

project = "Data-Parallel Workbook"
author = "the workbook's contributors"
html_title = project
language = "en"
extensions = ["myst_nb"]
exclude_patterns = ["_theme"]

nb_execution_mode = "off"  # outputs are those of the executed solutions
nb_merge_streams = True
myst_enable_extensions = ["colon_fence"]
# Links are turned into links between pages before Sphinx reads them, and checked afterwards.
myst_all_links_external = True
myst_heading_anchors = 4
# A notebook's headings may leave out a level, as cells of different sections do.
suppress_warnings = ["myst.header", "misc.highlighting_failure"]

html_theme = "sphinx_book_theme"
html_static_path = ["_theme/static"]
html_css_files = ["book.css"]
html_favicon = "_theme/static/icon.svg"
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "use_download_button": False,  # each notebook's page has its own line of ways
    "use_fullscreen_button": False,
    "use_source_button": False,
    "navbar_persistent": [],  # the search stands in the side bar
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}


def setup(app):
    app.connect("doctree-read", _behind_a_click)


def _behind_a_click(app, _):
    """Pages with answers stand in no list of pages, and a search does not find them."""
    name = app.env.docname
    if name.startswith("answers/"):
        app.env.metadata[name] |= {"orphan": True, "nosearch": True}
