"""Varied pairs of an expected answer and a text: typical and unusual texts of policies."""

from __future__ import annotations

import random

WORKED = r"Let $x$ be the value; as $x^2 - 3x + 2 = 0$, it is \(x = 1\) or \(x = 2\), so \[ \frac{1}{2} < x. \] "

SAME: dict[str, tuple[str, ...]] = {
    "7": (
        "7",
        "7.0",
        "+7",
        "007",
        "7.",
        r"\frac{14}{2}",
        "7 apples",
        r"7\text{ cm}",
        "seven",
        "x = 7",
        r"\text{7}",
        "{7}",
    ),
    "-12": ("-12", "- 12", r"-\frac{24}{2}", r"\left(-12\right)", "\u221212", "12"),
    "0": ("0", "-0", "0.0", r"\emptyset", "00"),
    "1234567": ("1234567", "1,234,567", "1 234 567", r"1{,}234{,}567", "1.234567e6", r"1.234567 \times 10^6"),
    r"\frac{3}{4}": (
        r"\frac{3}{4}",
        "3/4",
        "0.75",
        ".75",
        r"\dfrac34",
        r"\tfrac{6}{8}",
        r"75\%",
        "75",
        "0.7500001",
        "0.74",
    ),
    r"\(-\frac{5}{7}\)": (r"-\frac{5}{7}", r"\frac{-5}{7}", "-5/7", "-0.714286", "-0.7143"),
    "$2.5$": ("2.5", "5/2", "2,5", r"2\frac{1}{2}", "2.50000", "2.49"),
    "0.1": ("0.1", r"\frac{1}{10}", r"10\%", "0.10000000001", "1e-1"),
    r"35\%": (r"35\%", "35%", "35 percent", "0.35", r"\frac{35}{100}", "35", "3.5"),
    r"\sqrt{12}": (r"\sqrt{12}", r"2\sqrt{3}", r"2\sqrt3", "3.4641016", r"12^{1/2}", r"\sqrt[4]{144}"),
    r"\frac{\pi}{6}": (r"\frac{\pi}{6}", r"\pi/6", r"30^\circ", "0.5235988", "π/6", r"\frac16\pi"),
    "(2, 5)": ("(2, 5)", "(2,5)", r"\left(2,5\right)", "2, 5", r"\{2, 5\}", "[2, 5]", "x=2, y=5", "(5, 2)"),
    r"[1, \infty)": (r"[1, \infty)", r"[1,\infty)", r"\left[1,+\infty\right)", r"x \ge 1", r"1 \leq x", r"(1, \infty)"),
    r"(-\infty, 2) \cup (3, 4]": (r"(-\infty, 2) \cup (3, 4]", r"(3,4] \cup (-\infty,2)", r"(-\infty, 2] \cup (3, 4]"),
    r"\{1, 2, 3\}": (r"\{1, 2, 3\}", r"\{3,2,1\}", "1, 2, 3", "1,2 and 3", r"\{1,2\}", r"\left\{1,2,3\right\}"),
    r"\{-\frac{1}{2}, 4\}": (r"\{4, -\frac{1}{2}\}", r"-\frac{1}{2}, 4", r"x=4 \text{ or } x=-\frac12", "4"),
    "x^2 + 2x + 1": ("x^2 + 2x + 1", "(x+1)^2", "1+2x+x^2", "(x+1)(x+1)", "x^2+2x", "y^2+2y+1", "f(x) = (x+1)^2"),
    "x = 5": ("x = 5", "5", "x=5", "y = 5", "5 = x", "x=2+3=5"),
    "y = 2x + 1": ("y = 2x + 1", "2x - y + 1 = 0", "2x+1", "y - 2x = 1"),
    r"2^{10} - 1": ("2^{10} - 1", "1023", "1024 - 1", "2^10-1", r"1.023 \cdot 10^3"),
    r"3.2 \times 10^{-4}": (r"3.2 \times 10^{-4}", "0.00032", r"32 \cdot 10^{-5}", "3.2e-4", "0.0032"),
    r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}": (
        r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
        r"\begin{bmatrix}1&2\\3&4\end{bmatrix}",
        r"\begin{pmatrix} 1 & 2 \\ 3 & 5 \end{pmatrix}",
        "[[1,2],[3,4]]",
    ),
    r"\frac{1 + \sqrt{5}}{2}": (r"\frac{1 + \sqrt{5}}{2}", r"\frac{1}{2} + \frac{\sqrt5}{2}", "1.618034", r"\phi"),
    "3 + 4i": ("3 + 4i", "4i + 3", r"3+4\mathrm{i}", "5", "3 - 4i"),
    r"\ln 2": (r"\ln 2", r"\ln(2)", r"\log 2", "0.693147", r"-\ln\frac12"),
    r"e^{3} - 1": ("e^3 - 1", "e^{3}-1", "19.0855369", "e^2"),
    r"\frac{\sqrt{6} + \sqrt{2}}{4}": (r"\cos 15^\circ", r"\frac{\sqrt2}{4}(\sqrt3 + 1)", r"\cos\frac{\pi}{12}"),
    r"12\text{ cm}^2": (r"12\text{ cm}^2", "12", r"12\,\mathrm{cm}^2", "12 m"),
    r"\text{yes}": (r"\text{yes}", "yes", "Yes", r"\textbf{yes}", "no"),
    "B": ("B", r"\text{B}", r"\text{(B)}", "C", "b"),
    r"45^\circ": (r"45^\circ", "45", "45 degrees", r"\frac{\pi}{4}"),
    r"\binom{10}{3}": (r"\binom{10}{3}", "120", r"\frac{10!}{3!7!}", "210"),
    r"1 \le x < 4": (r"1 \le x < 4", "[1, 4)", r"x \in [1, 4)", "(1, 4)"),
    r"\infty": (r"\infty", r"+\infty", "infinity", r"-\infty"),
    r"\frac{x+1}{x-1}": (r"\frac{x+1}{x-1}", r"1 + \frac{2}{x-1}", r"\frac{1+x}{1-x}", "(x+1)/(x-1)"),
    "no solution": ("no solution", r"\text{no solution}", r"\varnothing"),
    "blah ((": ("blah ((", "7"),
    r"\frac{1": (r"\frac{1", "1"),
    r"\boxed{4}": ("4", r"\boxed{4}"),
    "$$9$$": ("9",),
    r"\( \frac{1}{3} \)": ("1/3", "0.333333", "0.333"),
    "": ("", "7"),
    "$": ("$", "7"),
}

FRAMES = (
    "$\\boxed{%s}$",
    "So the final answer is $\\boxed{%s}$.",
    WORKED + "Hence \\[\n\\boxed{%s}.\n\\]",
    "The answer is %s",
    "The final answer is $%s$. I hope it is correct.",
    WORKED + "Thus we get $%s$.",
    "First I thought \\boxed{99}, but it is \\boxed{%s}",
    "%s",
)

ODD: tuple[tuple[str, str], ...] = (
    ("5", ""),
    ("5", "\n\n"),
    ("5", "I do not know."),
    ("5", "\\boxed{}"),
    ("5", "\\boxed{5"),
    ("5", "\\boxed 5"),
    ("5", "\\fbox{5}"),
    ("5", "\\boxed{\\boxed{5}}"),
    ("5", "\\boxed{5} or \\boxed{6}"),
    ("5", "\\boxed{6}, not \\boxed{5}"),
    ("5", "\\boxed{5} and then some words follow here, and more of them, so \\boxed{6}"),
    ("5", "$\\boxed{5}$ and $\\boxed{6}$"),
    ("\\{5, 6\\}", "$\\boxed{5}$ and $\\boxed{6}$"),
    ("5", "\\boxed{5}\\%"),
    ("5", "$\\boxed{5}$%"),
    ("5", "$\\boxed{5}$ percent"),
    ("5", "$\\boxed{5}$ of $20$"),
    ("5", "The final answer is 6. I hope so. $\\boxed{5}$"),
    ("5", "The final answer is $6$. I hope it is. \\boxed{5}"),
    ("5", "Final answer: it is $x$, $\\boxed{5}$"),
    ("5", "the final answer is $x = 3$ and $\\boxed{5}$."),
    ("5", "the final answer is \\[ y, \\text{ or } \\[ \\boxed{5} \\]"),
    ("5", "the final answer is: \\boxed{x is $3$, $5}$"),
    ("\\{4, 5\\}", "$\\fbox{4}, \\boxed{5}$"),
    ("5", "5$\\boxed{5}$"),
    ("5", "\\$\\boxed{5}\\$"),
    ("5", "\\boxed{x $ 5}$"),
    ("5", "\\boxed{a}b}"),
    ("5", "\\boxed{ 5 }"),
    ("5", "\\boxed{5\n}"),
    ("5", "\\boxed{\n5}"),
    ("5", "\\[\\boxed{ [5}\\] "),
    ("5", "答案是 $\\boxed{5}$。"),
    ("5", "Die Lösung ist \\boxed{\uff15}"),
    ("5", "\x00\\boxed{5}\x00"),
    ("5", "\ud800 \\boxed{5}"),
    ("5", "\\boxed{\udfff}"),
    ("5", "so it is \ud83d"),
    ("5", "\u202e\\boxed{5}"),
    ("5", "(" * 300 + "5" + ")" * 300),
    ("5", "\\sqrt{" * 30 + "5" + "}" * 30),
    ("5", WORKED * 200 + "$\\boxed{5}$"),
    ("5", "9" * 4000),
    ("5", "\\boxed{" + "9" * 5000 + "}"),
    ("9" * 5000, "\\boxed{5}"),
    ("100000000000000000000", "\\boxed{100000000000000000000}"),
    ("5", "answer: 5"),
    ("5", "Answer: **5**"),
    ("5", "answer = 3 = 5"),
    ("5", "$5"),
    ("5", "5 6 7"),
    ("5", "7 6 5"),
    ("1/0", "\\boxed{1/0}"),
    ("\\frac{1}{0}", "\\boxed{\\infty}"),
    ("5", "```\n5\n```"),
    ("5", "<think>5</think> 6"),
)


def pairs() -> list[tuple[str, str]]:
    """Return more than 500 pairs. They are the same in each call."""
    rng = random.Random(5)
    framed = [
        (gold, frame % answer)
        for gold, forms in SAME.items()
        for answer in (*forms, str(rng.randint(-99, 999)))
        for frame in (FRAMES[0], *rng.sample(FRAMES[1:], 2))
    ]
    return [*framed, *ODD]


ATOMS = (
    "0", "7", "12", "007", "1,234", "1{,}000", "3.14", ".5", "5.", "0,5", "x", "y", "n", r"\pi", "e", "i", r"\alpha",
    r"\infty", r"\frac{1}{2}", r"\frac12", r"\sqrt{2}", r"\sqrt[3]{5}", "x_1", "f(x)", r"\sin x", r"\ln 2",
    r"\log_2 8", r"\binom{5}{2}", "5!", "|x|", r"\text{cm}", r"50\%", r"45^\circ", r"\emptyset",
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"2\frac{1}{2}", r"\int_0^1 x dx", r"\sum_{k=1}^n k", "10^{-4}", "1e5",
    "A", r"\overline{AB}", "x'", r"\pm 3", r"\frac{dy}{dx}",
)  # fmt: skip
OPERATORS = (
    "+", "-", "*", "/", r"\cdot ", r"\times ", "^", "_", "=", ",", ";", " ", "<", ">", r"\le ", r"\geq ", r"\in ",
    r"\cup ", r"\cap ", r"\setminus ", r"\ne ", r"\pm ", r"\text{ or }", r"\text{ and }", ":", "!", "", r"\approx ",
)  # fmt: skip
WRAPPERS = (
    "(%s)", "[%s]", r"\{%s\}", r"\left(%s\right)", "[%s)", "(%s]", r"\left[%s\right)", r"\frac{%s}{3}",
    r"\frac{2}{%s}", r"\sqrt{%s}", "|%s|", "x^{%s}", "2^{%s}", "x_{%s}", "e^{%s}", r"\sin(%s)", r"\ln(%s)", "-%s",
    "%s^2", "%s^{n+1}", "f(%s)", r"\left|%s\right|", "%s!", r"%s\%%", r"\cos^2(%s)", "x=%s", r"x\in %s",
)  # fmt: skip


def draw_formulas(number: int, seed: int) -> list[str]:
    """Return random formulas, and answers of the corpus with one to three random edits. Many have syntax errors."""
    rng = random.Random(seed)
    answers = sorted({answer for gold, forms in SAME.items() for answer in (gold, *forms)})
    return [
        _draw_formula(rng) if rng.random() < 0.5 else _edit_randomly(rng, rng.choice(answers)) for _ in range(number)
    ]


def _draw_formula(rng: random.Random, depth: int = 0) -> str:
    kind = rng.random()
    if depth > 3 or kind < 0.3:
        return rng.choice(ATOMS)
    if kind < 0.65:
        return _draw_formula(rng, depth + 1) + rng.choice(OPERATORS) + _draw_formula(rng, depth + 1)
    if kind < 0.92:
        return rng.choice(WRAPPERS) % _draw_formula(rng, depth + 1)
    return ",".join(_draw_formula(rng, depth + 1) for _ in range(rng.randint(2, 3)))


def _edit_randomly(rng: random.Random, answer: str) -> str:
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(answer) + 1)
        added = rng.choice("0123456789xyn+-^_/(){}[]|,.=\\!' <>") if rng.random() < 0.6 else ""
        answer = answer[:at] + added + answer[at + (not added) :]
    return answer


def mixed_pairs(number: int) -> list[tuple[str, str]]:
    """Return pairs of an expected answer and a boxed answer. Half of the answers have a different expected answer."""
    rng = random.Random(7)
    golds, others = list(SAME), [answer for forms in SAME.values() for answer in forms]
    found = []
    for _ in range(number // 2):
        gold = rng.choice(golds)
        found += [(gold, rng.choice(SAME[gold])), (rng.choice(golds), rng.choice(others))]
    return [(gold, f"$\\boxed{{{answer}}}$") for gold, answer in found]
