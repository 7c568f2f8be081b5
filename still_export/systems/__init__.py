"""Research systems, one folder each. Nothing outside a folder names it; `still_export.discovery` finds it.

A system is a package with some of these modules. Another package has the same shape if it names itself in the entry-point group
"still_export.systems":

    mixer.py    MIXERS: its layers (`still_export.mixers.base.Mixer`)
    family.py   FAMILIES: its models (`still_export.models.families.softmax_families.Family`)
    folder.py   FOLDERS: recognises folders whose config.json names another family (`still_export.discovery.Folder`); without torch
    recipe.py   LINEARIZERS: conversions of softmax layers (`still_export.mixers.layers.Linearizer`), next to their recipes *.yaml
    finder.py   FINDERS: measurements of layers before training (`still_export.mixers.layers.Finder`)
"""
