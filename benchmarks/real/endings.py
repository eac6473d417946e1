"""What may stand behind a text in quotation marks, to ask a model for one word: combined from nouns and frames."""

from __future__ import annotations

from dataclasses import dataclass

PROMPT_EOL = "PromptEOL"
#: What stands before a text, by language, and what between two copies of it.
BEGINNINGS = {
    "en": "The essence of a sentence is often captured by its main subjects and actions, while descriptive terms "
    'provide additional but less central details. With this in mind , this sentence : "',
    "zh": "一句话的要义往往在于它的主语和动作，修饰性的词语只补充次要的细节。考虑到这一点，这句话：“",
}
BETWEEN = {"en": '" can be rewritten as : "', "zh": "”可以改写为：“"}
#: The words of Echo topic up to the ending.
USUAL = {language: f"{BEGINNINGS[language]}{{text}}{BETWEEN[language]}{{text}}" for language in BEGINNINGS}
#: What is tried in the place of Knowledge's words, each before `this sentence : "`; and whole beginnings.
BEFORE_EN = (
    "After thinking step by step , ", "Every text has a topic. In this case , ",
    "Texts on one topic belong together. As to ",
    "The topic of a text is what it is about. With this in mind , ",
    "The topic of a text can be said in one word. With this in mind , ",
    "A text is about one thing above all: its topic. With this in mind , ",
    "A librarian files each text under one word. With this in mind , ",
    "An expert sorts texts by what they are about. With this in mind , ",
    "You are a careful annotator. You name the topic of each text. With this in mind , ",
    "The essence of a sentence is often captured by its main subjects and actions. With this in mind , ",
    "The essence of a sentence is often captured by its main subjects and actions, while descriptive terms "
    "provide additional but less central details. ",
    "The meaning of a sentence lies in its main subjects and actions. With this in mind , ",
    "Descriptive terms matter less than subjects and actions. With this in mind , ",
    "A sentence is defined by who does what to whom. With this in mind , ",
    "Two sentences are alike if they say the same. With this in mind , ",
    "Two sentences that mean the same have the same topic. With this in mind , ",
    "Words differ, but what is meant may be the same. With this in mind , ",
    "A good summary keeps subjects, actions and objects. With this in mind , ",
    "Topics of texts in one word are, for instance, sports, music, cooking, travel, law. With this in mind , ",
    '"A man plays a guitar." is about music. "Shares fell on Monday." is about finance. And ',
    'This sentence : "A man plays a guitar." and its topic in one word is:"music". And ',
    "Here is a sentence and what it is about. In short , ", "Read this carefully. ", "As everybody knows , ",
    "The weather is fine today, and the sea is calm. ", "Once upon a time there was a king who had three daughters. ",
)  # fmt: skip
WHOLE_EN = (
    '"', 'This sentence : "', 'Text: "', 'Sentence: "', 'The following text: "', 'Query: "',
    'I sort texts. This one : "',
)  # fmt: skip
BETWEEN_EN = (
    '" , that is , "', '" In other words : "', '" means "', '" "', '" and again : "', '" can be repeated as : "',
    '" is about : "', '" can be said as : "',
)  # fmt: skip
WHOLE_ZH = (
    "“", "这句话：“", "文本：“", "新闻标题：“", "每句话都有一个主题。这句话：“",
    "一段话讲的是什么，可以用一个词说出来。这句话：“",
    "意思相同的话，主题也相同。考虑到这一点，这句话：“", "图书管理员把每段文字归入一个领域。这句话：“",
    "一句话的要义往往在于它的主语和动作。这句话：“",
)  # fmt: skip
BETWEEN_ZH = ("”，也就是说：“", "”，换句话说：“", "”“", "”的意思是：“")


def layouts(language: str) -> list[str]:
    """What is tried before and between two copies of ``{text}``: the usual words, and others for either of them."""
    begun, joints = [*WHOLE_EN, *(f'{words}this sentence : "' for words in BEFORE_EN)], list(BETWEEN_EN)
    if language == "zh":
        begun, joints = list(WHOLE_ZH), list(BETWEEN_ZH)
    return [
        USUAL[language],
        *(f"{words}{{text}}{BETWEEN[language]}{{text}}" for words in begun),
        *(f"{BEGINNINGS[language]}{{text}}{words}{{text}}" for words in joints),
    ]


@dataclass(frozen=True)
class Ending:
    """What follows the text. It begins with the mark that closes the quotation.

    Attributes:
        words: As they stand in the prompt.
        origin: ``"PromptEOL"``, ``"combined"``, or the name of the model that wrote it.
    """

    words: str
    origin: str = "combined"


NOUNS_EN = (
    "topic", "main topic", "general topic", "specific topic", "theme", "main theme", "central theme", "subject",
    "main subject", "subject matter", "meaning", "core meaning", "gist", "essence", "summary", "idea", "main idea",
    "central idea", "point", "main point", "message", "keyword", "main keyword", "key concept", "concept", "intent",
    "intention", "purpose", "category", "class", "domain", "field", "content", "context", "focus", "title", "tag",
    "label", "event", "situation", "action", "request", "question", "answer",
)  # fmt: skip
FRAMES_EN = (
    '" and its {noun} in one word is:"', '" and its {noun} in a single word is:"', '" and its {noun} is:"',
    '" and in one word its {noun} is:"', '". In one word, its {noun}:"', '". {Noun}:"',
)  # fmt: skip
#: Numbers and kinds of words, for the nouns that are promising.
NUMBERS_EN = (
    "in two words", "in three words", "in a few words", "in just one word", "in exactly one word", "in one noun",
    "in one English word", "in one lowercase word", "in one general word", "in one specific word", "in one simple word",
    "in one or two words", "as one word", "in a word", "in short",
)  # fmt: skip
NUMBERED_EN = ("topic", "main topic", "theme", "meaning")
VERBS_EN = (
    "means in one word:", "means in a single word:", "can be summarized in one word:",
    "can be summarized in one word as:", "can be described in one word as:", "can be classified in one word as:",
    "can be labelled in one word as:", "is about one topic:", "is about, in one word:", "is in one word about:",
    "is mainly about, in one word:", "talks in one word about:", "concerns in one word:", "describes in one word:",
    "expresses in one word:", "refers in one word to:", "belongs to the category:", "belongs to the topic:",
    "is an example of:", "is a sentence about:", "has to do with:", "is related to:", "says in one word:",
    "asks in one word for:", "in other words:", "in one word:", "reminds one in one word of:",
    "and its topic and intent in one word is:", "and its topic and meaning in one word is:",
    "and its main topic and purpose in one word is:", "and the topic in one word is:", "and the main topic is:",
    "and its topic in one word:", "and its topic, in one word, is:", "whose topic in one word is:",
    "with the topic in one word:", "and its topic in one word would be:", "and its topic in one word is about:",
    "and its topic in one word is the word:", "and its topic in one word is called:",
    "and the one word that says its topic is:", "and the best word for its topic is:",
    "and the word that describes it best is:", "and the most important word in it is:",
    "and a search for it would use the word:", "and somebody who says this talks about:",
    "and it is filed under the heading:", "and it is found in the section on:",
)  # fmt: skip

NOUNS_ZH = (
    "主题", "话题", "主旨", "意思", "含义", "要点", "核心", "类别", "关键词", "内容", "中心思想", "大意",
    "主要内容", "领域", "意图", "目的", "对象", "事件", "概念", "主要意思",
)  # fmt: skip
FRAMES_ZH = (
    "”，用一个词概括{noun}是：“", "”，它的{noun}用一个词来说是：“", "”，它的{noun}是：“",
    "”，这句话的{noun}，用一个词概括：“", "”。{noun}：“",
)  # fmt: skip
OTHERS_ZH = (
    "”用一个词来概括就是：“", "”，用一个词概括是：“", "”，用一个词来说就是：“", "”，一个词：“",
    "”，简单说就是：“", "”，换句话说：“", "”，用两个字概括是：“", "”，用四个字概括是：“",
    "”，用一个词概括就是：“", "”，用一个词语概括是：“", "”，用一个名词概括是：“",
    "”，用一个关键词概括是：“", "”，用几个词概括是：“", "”，一言以蔽之：“", "”，总之是：“",
    "”，说的是：“", "”，讲的是：“", "”，用一个词概括它说的是：“", "”，属于：“", "”，最重要的词是：“",
)  # fmt: skip

#: What the models themselves wrote when they were asked to go on.
WRITTEN: dict[str, dict[str, tuple[str, ...]]] = {
    "en": {
        "SmolLM2-135M-Instruct": (
            "and his word for it is:", "and the topic is:", "can be summarized as:", "can be summarized in a word as:",
            "in one two words:", "which can be summarized as:", "which is about:",
        ),
        "Gemma 3 270M": (
            "and it is in a thread related to topic:", "and it refers to:", "and it relates to:",
            "and the word is for its theme is:", "and the word it is :", "can be said as:", "is about:", "it is about:",
            "refers to:", "so the word is:", "the word it's about:", "this word can be interpreted as:",
            "which is a word that means:", "where it talks about:",
        ),
    },
    "zh": {
        "Gemma 3 270M": (
            "，一句是：", "，它的“主题”是：", "，属于这个词：", "，说的是：", "，这句话说的是：",
            "，这是一个热门话题：",
        ),
    },
}  # fmt: skip


#: What was chosen, for two copies of a text, by the mean over models and development tasks.
CHOSEN = {"en": '" and its topic in one word is:"', "zh": "”，它的领域是：“"}


def endings(language: str) -> list[Ending]:
    """Every ending that is tried in a language, PromptEOL's first."""
    if language == "zh":
        combined = [frame.format(noun=noun) for frame in FRAMES_ZH for noun in NOUNS_ZH]
        words = [*OTHERS_ZH, *combined]
    else:
        framed = [frame.format(noun=noun, Noun=noun.capitalize()) for frame in FRAMES_EN for noun in NOUNS_EN]
        numbered = [f'" and its {noun} {number} is:"' for noun in NUMBERED_EN for number in NUMBERS_EN]
        words = [*(f'" {verb}"' for verb in VERBS_EN), *framed, *numbered]
    first = Ending(words[0], PROMPT_EOL)
    quoted = "”{words}“" if language == "zh" else '" {words}"'
    written = [Ending(quoted.format(words=each), origin) for origin, own in WRITTEN[language].items() for each in own]
    unique = {each.words: each for each in (*written, *map(Ending, words), first)}
    return sorted(unique.values(), key=lambda each: each.origin != PROMPT_EOL)


#: The layout of Echo topic, by language, with PromptEOL's ending.
MEANS = {language: f"{before}{endings(language)[0].words}" for language, before in USUAL.items()}
