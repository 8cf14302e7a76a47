"""The web book: the repository's own pages and its executed notebooks as a static site.

`pages` says which pages there are. `staging` writes their sources for Sphinx, `notebook_pages`
those of the notebooks, `repository_links` turns links between files into links between pages.
`site` runs Sphinx. Nothing is executed: outputs are those that solutions/NN_name.ipynb holds.
"""
