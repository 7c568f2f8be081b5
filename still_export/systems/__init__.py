"""Research systems, one folder each. Nothing outside a folder names it: `still_export.discovery` finds it.

A system is a package with some of these modules; a package of one's own that names itself in the entry-point group
"still_export.systems" has the same shape:

    mixer.py    MIXERS: its layers (`still_export.mixers.base.Mixer`)
    family.py   FAMILIES: its models (`still_export.models.families.softmax_families.Family`)
    folder.py   FOLDERS: how folders are recognised that name another family (`still_export.discovery.Folder`); without torch
    recipe.py   LINEARIZERS: what softmax layers become by it (`still_export.mixers.layers.Linearizer`), with recipes *.yaml beside
    finder.py   FINDERS: what measures layers before training (`still_export.mixers.layers.Finder`)
"""
