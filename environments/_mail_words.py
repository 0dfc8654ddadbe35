"""What the made-up mails are written with."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FIRST_NAMES = _words(
    "Ada Boris Carla Dmitri Elena Farid Greta Hugo Ines Jonas Karin Leon Mira Nils Olga Pavel "
    "Quentin Rosa Stefan Tilda Umar Vera Walter Yara"
)
LAST_NAMES = _words(
    "Abel Brandt Castell Dorn Ebner Falk Gruber Hansen Ivers Jansen Keller Lindt Moser Novak Ortiz Petrov "
    "Quist Rauch Sommer Tamm Ulrich Varga Weiss Young Zeller Arnold Becker Conti Dufour Engel Fiala Graf"
)
ADJECTIVES = _words(
    "Amber Azure Brave Bright Calm Cedar Clear Copper Coral Crimson Dawn Deep Early Emerald Fair Gentle "
    "Golden Grand Green Hidden Ivory Jade Keen Late Light Lunar Merry Misty Noble North Pale Quiet "
    "Rapid Red Royal Silver Solar Swift Velvet Winter"
)
NOUNS = _words(
    "Anchor Arrow Beacon Bridge Canyon Castle Comet Compass Creek Crown Delta Eagle Falcon Field Forest Fox "
    "Garden Glacier Harbor Heron Island Lantern Lark Meadow Mill Orchard Otter Peak Pine Raven Reef River "
    "Sparrow Spring Star Stone Summit Tower Valley Willow"
)
TRADES = _words(
    "Cables Canvas Crates Engines Fittings Foils Freight Glass Labels Motors Paper Plastics Pumps Steel Timber Tools"
)
PLACES = _words(
    "Antwerp Basel Bergen Bilbao Bremen Cork Delft Dover Genoa Ghent Gdansk Graz Kiel Leeds Liege Lille "
    "Linz Lucerne Malmo Nantes Porto Riga Tallinn Turku"
)
TOPICS = (
    "open points",
    "planning",
    "next steps",
    "question",
    "short update",
    "notes",
    "before the weekend",
    "reminder",
)
FILLERS = (
    "Hope you had a good weekend.",
    "Thanks for the quick reply.",
    "Sorry for the late answer, the train was stuck again.",
    "I will be out of the office on Friday.",
    "The coffee machine on our floor works again.",
    "Let me know if I forgot somebody.",
    "Please keep this among us for now.",
    "We can talk about the rest over lunch.",
    "I have not heard back from the others yet.",
    "The printer ate my notes, so this is from memory.",
    "Could you have a look when you find the time?",
    "It was good to see you all in person.",
    "I attach nothing, all of it is below.",
    "My phone is off in the afternoon.",
    "The new colleagues start next month.",
    "Nobody has complained so far.",
    "I would rather not decide this alone.",
    "We should meet more often, and for a shorter time.",
    "The customer was friendly, but in a hurry.",
    "I checked it twice.",
    "This may still change, I will tell you.",
    "Feel free to forward this.",
    "The heating is being repaired, bring a pullover.",
    "More on this soon.",
)
