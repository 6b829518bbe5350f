"""The rules that a run's arguments must satisfy, by topic.

A rule yields one violation for each way in which it is broken; one that is a condition and a sentence is a row (`refused`,
`warned`). All rules are always asked, so that a user reads everything that is wrong at once.
"""
