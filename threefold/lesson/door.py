"""Contributions of lessons to the core (`threefold.doors`)."""

from typing import Final

NEEDS: Final = ("verify",)
NAMES: Final = {"explain": "threefold.lesson.explain:explain"}
TYPES: Final = {
    "Lesson": "threefold.lesson.lesson:Lesson",
    "LessonEvent": "threefold.lesson.lesson:LessonEvent",
    "LessonPass": "threefold.lesson.lesson:LessonPass",
}
