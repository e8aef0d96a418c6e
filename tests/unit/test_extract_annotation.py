"""The order of annotation text, and how it is appended."""

from __future__ import annotations

from planroom.extract import ANNOTATION_MARK
from planroom.extract.annotation import Annotation, appended, in_order


def test_annotations_stand_in_the_order_they_are_displayed() -> None:
    below, right, left = Annotation(9, 1, "c"), Annotation(1, 9, "b"), Annotation(1, 2, "a")

    assert in_order([below, right, left]) == [left, right, below]


def test_the_same_annotation_listed_twice_is_one_but_a_tag_at_two_doors_is_two() -> None:
    one, two = Annotation(1, 1, "D-1"), Annotation(5, 1, "D-1")

    assert in_order([one, two, one]) == [one, two]


def test_annotation_text_follows_under_a_mark() -> None:
    assert appended("NOTES\n", [Annotation(0, 0, "X")]) == f"NOTES\n\n{ANNOTATION_MARK}\nX"
    assert appended(" ", [Annotation(0, 0, "X")]) == f"{ANNOTATION_MARK}\nX"
    assert appended("NOTES", []) == "NOTES"
