"""Makes 500 texts for the comparison of two tokenizers: kinds of text that normalisers and pre-tokenizers treat
differently.

The texts follow from the tables below and do not change, so a comparison can be repeated.  Only the last texts depend
on the tokenizer: they contain its control tokens.
"""

from collections.abc import Sequence
from itertools import product

NUM_TEXTS = 500

_WORDS = (
    "the The THE hello Hello HELLO don't I'll we've it's 'The' 'tis o'clock eBay mL NaOH pH iPhone camelCase "
    "PascalCase snake_case kebab-case SHOUT_CASE café CAFÉ naïve Straße ﬁne Ω μ İstanbul ısı e.g. U.S.A. "
    "Ph.D. re-use 1st 2nd x2 H2O C++ C# .NET @user #tag a/b and/or A&B 50% $5 €5 £5.00 ¥100 §3 ©2024 "
    "½ x² 10³ 5′ 6″ … — – “quoted” ‘quoted’ «quoted» state-of-the-art antidisestablishmentarianism Donaudampfsc"
    "hifffahrtsgesellschaft ### *** --- === ``` <b> </b> &amp; \\n \\t %20 ~/.bashrc"
).split()
_NUMBERS = (
    "0 7 12 123 1234 12345 123456 1234567890 00123 3.14 -1 +1 1e10 1E-9 1,000 1,234,567.89 1_000 0x1F "
    "0b101 2024-01-31 31/12/1999 23:59:59 192.168.0.1 v1.2.3 +49(30)1234 ٣٤٥ १२३ 一二三 Ⅷ 1/2 99.9%"
).split()
_SCRIPTS = (
    "你好，世界。|今天天氣很好！|日本語のテキストです。|カタカナ ヒラガナ ｶﾀｶﾅ|안녕하세요 세계|Привет, мир!|Γειά σου Κόσμε|שלום עולם|مرحبا بالعالم|"
    "السَّلَامُ عَلَيْكُمْ|नमस्ते दुनिया|ওহে বিশ্ব|வணக்கம் உலகம்|สวัสดีชาวโลก|Xin chào thế giới|გამარჯობა|"
    "Բարեւ|ሰላም ልዑል|မင်္ဂလာပါ|ជំរាបសួរ|ສະບາຍດີ|Ænima Þór Ðuro|Łódź żółw|Češi řeknou|Ğüşöçı|ᚠᚢᚦ|𝒜𝓁𝓅𝒽𝒶|ＦＵＬＬ　ＷＩＤＴＨ|"
    "٪؟،|￼�"
).split("|")
_EMOJI = (
    "😀 👍🏽 👨‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 🇺🇸🇯🇵 ❤️ ❤ ☎️ 1️⃣ 🧑‍🚀🚀 🫠 ✨✨✨ ¯\\_(ツ)_/¯ (╯°□°)╯︵┻━┻ :-) <3 ♠♥ ∑∫√∞ →←↔ ░▒▓ ①② "
    "™ ℃ №"
).split()
_ACCENTS = (  # composed and decomposed, which NFC makes equal, and compatibility forms, which NFKC replaces
    "é|e\u0301|ñ|n\u0303|ü|u\u0308|å|a\u030a|Å|\u212b|ö|o\u0308|ç|c\u0327|ế|e\u0302\u0301|한|\u1112\u1161\u11ab|"
    "が|か\u3099|й|и\u0306|ﬃ|ffi|ﷺ|²|½|Ⅳ|ǆ|\u0344"
).split("|")
_INVISIBLE = (
    "\u00a0 \u200b \u200c \u200d \u2009 \u202f \u2028 \u2029 \u3000 \ufeff \u00ad \u0085 \u180e \u2060 "
    "\u200e \u061c \x01 \x1b[0m \x7f \x0b \x0c \ufe0f \U000e0041 \ue000"
).split(" ")
_BLANKS = " |  |   |    |\t|\t\t| \t|\n|\n\n|\n\n\n|\r\n|\r\n\r\n|\r| \n|\n | \n \n ".split("|")
_AROUND = ("{}", "a{}b", "a{}", "{}b", "1{}2", "你{}好")
_CODE = (
    "def f(x):\n    return x + 1\n",
    "if a:\n\tb()\n\telse:\n\t\tc()\n",
    "for (int i = 0; i < n; ++i) { sum += a[i]; }",
    "const f = async ({ a, b }) => await g(a ?? b);",
    'fn main() { println!("{:?}", v.iter().map(|x| x * 2)); }',
    "SELECT * FROM t WHERE a <> 'b''c' AND d IS NOT NULL;",
    '{"name": "f", "arguments": {"x": [1, 2.5, null, true]}}',
    "<div class=\"a b\"><p>Hi&nbsp;there</p><!-- c --></div>",
    "\\begin{equation} \\frac{a_1}{b^{2}} \\leq \\sum_{i=0}^{n} x_i \\end{equation}",
    "#include <stdio.h>\n#define MAX(a,b) ((a)>(b)?(a):(b))\n",
    "echo \"$HOME\" | sed -e 's/a/b/g' > /dev/null 2>&1",
    "x = lambda *a, **k: a[0] if a else k.get('b', None)  # note",
    "| a | b |\n|---|:-:|\n| 1 | 2 |\n",
    "- one\n  - two\n    1. three\n\n> quote\n\n# Title\n",
    "import numpy as np\n\n\nclass A(B):\n    \"\"\"Doc.\"\"\"\n\n    def __init__(self) -> None: ...\n",
    "diff --git a/x b/x\n@@ -1,2 +1,2 @@\n-old\n+new\n",
    "key: value\nlist:\n  - a\n  - b: {c: d}\n",
    "std::vector<std::pair<int, int>> v{{1, 2}, {3, 4}};",
    "SGVsbG8sIHdvcmxkIQ==",
    "3f2504e0-4f89-11d3-9a0c-0305e82c3301",
    "^(?:[a-z0-9!#$%&'*+/=?^_`{|}~-]+)@(?:\\w+\\.)+\\w{2,}$",
    "C:\\Users\\a b\\file.txt",
    "a=1;b=2;;c==3;d!==4;e<=>5;f:=6",
    "((((([[[[[{{{{{}}}}}]]]]])))))",
)  # fmt: skip
_ADDRESSES = (
    "https://example.com/a/b?c=d&e=%20f#g http://localhost:8080 www.example.org/~me ftp://x.y/z.tar.gz "
    "mailto:first.last+tag@example.co.uk git@github.com:a/b.git s3://bucket/key /usr/local/bin/python3.11 "
    "../../x.txt file:///C:/a%20b.txt data:image/png;base64,iVBORw0KGgo= doi:10.1000/182 //cdn.x.io/a.js?v=1 "
    "arXiv:2401.00001v2 2001:db8::1 a.b.c.d.e.f https://例え.jp/パス?q=値 #/components/schemas/A"
).split()
_RUNS = ("a", " ", "\n", "\t", "0", "-", "=", ".", "!", "_", "ab", "你", "😀", "é", " a", "\n ", "A", "'")
_SENTENCES = (
    "The quick brown fox jumps over the lazy dog.|Dr. Smith's car isn't here; it's \"there\", isn't it?|"
    "HE SAID: I'M HERE, THEY'RE NOT.|What?! No... Yes -- perhaps (maybe).|Der Straßenbau kostet 1.234,56 "
    "€.|Où est l'hôtel ? À côté.|¿Qué pasó, señor? ¡Nada!|我用Python写了2个程序。|GPT-4は2023年3月に公開された。|Это test "
    "на 3 языках: 中文.|Price:$19.99(was $24.99)|a,b;c:d|Line one.\nLine two.\n\nParagraph two.| leading "
    "and trailing |  two  spaces  |Tabs\tand\nnewlines\r\n|user\nassistant\nsystem|What is 6 x 7?\n42|"
    "E=mc² and a²+b²=c²|I ❤️ NY 🇺🇸!|naïve café résumé|na\u0308ive cafe\u0301|مرحبا hello שלום|1. First\n2. "
    "Second|No\u00a0break\u200bhere"
).split("|")
_CONTROLS = "{}|a{}b| {} |{}\n|\n{}|{}{}|Hello {} world|{}user\nHi|Hi{}|<{}>|{}.|'{}'".split("|")


def probe_texts(control: Sequence[str]) -> list[str]:
    """500 different texts.  The last ones contain control tokens from `control`, the tokenizer's added tokens."""
    fixed = [
        *_SENTENCES,
        *_WORDS,
        *(f" {word}" for word in _WORDS[:30]),
        *_NUMBERS,
        *_SCRIPTS,
        *_EMOJI,
        *_ACCENTS,
        *(f"a{text}b" for text in _INVISIBLE),
        *(around.format(blank) for around, blank in product(_AROUND, _BLANKS)),
        *_CODE,
        *_ADDRESSES,
        *(text * 40 for text in _RUNS),
    ]
    texts = dict.fromkeys(fixed)
    tokens = control or ["<|none|>"]
    for i in range(4 * NUM_TEXTS):  # each token with different text around it, then with numbers
        token, around = tokens[i % len(tokens)], _CONTROLS[(i + i // len(tokens)) % len(_CONTROLS)]
        text = around.replace("{}", token) if i < NUM_TEXTS else f"{token}{i}"
        if len(texts) == NUM_TEXTS:
            break
        texts[text] = None
    return list(texts)
