"""The attack suite: what an enemy, a broken disk or a wrong server may do to a checkpoint, as data.

``test_attacks.py`` runs every :class:`~tests.storage.attacks.case.Attack` in the list ``CASES`` of
every other module of this folder, once on each kind of store that it names.  To add a case, add it
to the list of the module whose room it belongs to; for a new room, add a module with a ``CASES``::

    CASES = [
        Attack(
            "what is done, in a few words",
            attack=function,              # function(place) does it and may return something
            must=Refused("text of it"),   # or Gives(what function must return)
            on=("local", "s3fs"),         # where it applies; by default local, s3fs and obstore
        ),
    ]

``place`` (``tests.storage.conftest.Place``) is an empty folder on that store: ``place.writer()``,
``place.reader()``, ``place.store()``, ``place.below(name)``; it holds nothing of another case.  A
case that needs a server of its own, or another process, starts it itself.

The whole suite takes less than two minutes: a case takes a second or so, and has `seconds` at most.
"""
