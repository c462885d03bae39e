"""The vocabulary of generated tasks: English nouns, names and places without characters that need quoting."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NOUNS = _words(
    "amber anchor apple arrow atlas bacon badge baker barley basin beacon birch bishop blanket bottle bridge bronze "
    "bucket butter cabin cactus camera candle canvas carbon carpet castle cedar cellar cherry cinder circle clover "
    "cobalt comet copper coral corner cotton cradle crater cricket crystal dagger daisy delta desert diamond dolphin "
    "dragon eagle ember engine falcon feather fennel ferry fiddle field flint forest fossil fountain fox garden garlic "
    "ginger glacier goblet granite gravel hammer harbor harvest hazel helmet heron hollow honey island ivory jacket "
    "jasmine jungle kettle kiln ladder lagoon lantern lemon lever linen lotus magnet maple marble meadow mercury "
    "meteor mirror mortar mosaic mountain mustard needle nickel oasis ocean olive onyx orchid oyster paddle palace "
    "panther parcel pebble pepper pillar pilot planet plaza pollen prism pumice quarry quartz quiver rabbit radish "
    "raven ribbon river rocket saddle saffron salmon sapphire shadow shelter silver spruce stable summit sunset "
    "temple thistle thunder timber topaz tulip tunnel turtle valley velvet violet walnut willow window winter yarrow"
)

PEOPLE = _words(
    "Ada Alan Alice Amara Ben Bruno Carla Chen Clara Dario Dina Elena Emil Esra Femi Fiona Goran Grace Hana Hugo Ines "
    "Ivan Jana Jonas Kai Kenji Lara Leo Lina Malik Mara Milo Nadia Noor Omar Otto Paula Petra Quinn Rafael Rosa Sami "
    "Sofia Tara Theo Uma Viktor Wanda Yara Zoe"
)

CITIES = _words(
    "Accra Athens Bergen Bogota Bremen Cairo Cork Dakar Delft Genoa Ghent Hanoi Izmir Kyoto Lagos Leeds Lima Lisbon "
    "Lyon Malmo Nairobi Oslo Porto Prague Quito Riga Rome Seville Tampere Turin Utrecht Vienna Zagreb"
)

SERVICES = _words(
    "auth billing cache catalog checkout gateway indexer ledger mailer notifier orders payments queue search"
)

LEVELS = ("DEBUG", "INFO", "WARN", "ERROR")

COLOURS = _words("red orange yellow green blue indigo violet grey black white")
