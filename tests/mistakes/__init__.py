"""What users do by mistake, and the sentence that each of them gets.

A mistake is data (:class:`~tests.mistakes.case.Mistake`): a function that does what the user does,
in one line what that is, and the error, warning or log line that must name it, on all ranks.
``test_mistakes.py`` runs all of them on two real ranks, in one call of the pool.

To add one: decorate a function with :func:`~tests.mistakes.case.mistake` in the module that it
belongs to.
"""
