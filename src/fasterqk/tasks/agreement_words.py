"""The words of the generated agreement language; only nouns show number."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NOUNS = _words("""
    actor artist author baker banker barber boxer builder butcher captain carpenter chef clerk coach cook
    dancer dentist doctor driver editor engineer farmer fisher gardener guard hunter inventor janitor judge
    lawyer librarian manager mayor mechanic merchant miner nurse officer painter pilot plumber poet porter
    producer runner sailor scholar sculptor senator sergeant singer skater soldier student surgeon surveyor
    tailor teacher tourist trader tutor waiter weaver writer bridge cabinet camera candle carpet castle
    garden guitar island kettle ladder lantern mirror pencil picture tunnel
""")
# Past tense: the same for one and for many.
VERBS = _words("""
    admired advised avoided blamed called chased cheered copied envied feared followed found greeted helped
    hired ignored invited joined knew liked met missed noticed observed painted passed praised pushed
    remembered respected saw sketched studied thanked trusted visited warned watched welcomed
""")
ADJECTIVES = _words("""
    ancient angry brave bright calm careful clever cold curious dark eager famous fierce gentle happy
    honest humble lazy little lonely loud modern nervous noisy old patient polite proud quiet quick red shy
    silent small strange tall tired warm wise young
""")
PREPOSITIONS = _words("""
    above across against around before behind below beneath beside by near opposite under with
""")
OPENERS = _words("""
    today yesterday often sometimes usually perhaps surprisingly apparently recently finally meanwhile
    naturally luckily oddly
""")
DETERMINERS = _words("the my your his her our their")
RELATIVE = "that"
COMMA = ","
