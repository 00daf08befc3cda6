//! Mutations of chat templates that remove, add or change words.

use super::{json, stretch};
use rand::{Rng, rngs::StdRng, seq::IndexedRandom};

/// The words that are inserted into templates. Some words occur in chat templates, and other words make a template exceed the
/// limits of the renderer.
const WORDS: &[&str] = &[
    "{{ messages }}",
    "{{ messages[0]['content'] }}",
    "{{ messages | tojson }}",
    "{{ messages | tojson(indent=4) }}",
    "{{ messages | tojson(indent=1000000000000) }}",
    "{{ range(100000) | list }}",
    "{{ 'a' * 1000000000 }}",
    "{{ [0] * 1000000000 }}",
    "{{ ('a' * 10000).replace('a', 'a' * 10000) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ 'a'.center(1000000000) }}",
    "{{ 'a' | indent(1000000000) }}",
    "{{ 2 ** 1000000 }}",
    "{{ 1 // 0 }}",
    "{{ 1 % 0 }}",
    "{{ -9223372036854775808 // -1 }}",
    "{{ raise_exception('no') }}",
    "{{ strftime_now('%Y') }}",
    "{{ strftime_now('%1000000000Y') }}",
    "{% for message in messages %}",
    "{% for number in range(1000000) %}",
    "{% for a in 'aaaa' recursive %}{{ loop('aaaa') }}",
    "{% endfor %}",
    "{% if add_generation_prompt %}",
    "{% elif enable_thinking %}",
    "{% else %}",
    "{% endif %}",
    "{% set x = 'a' %}",
    "{% set x = namespace(y=0) %}",
    "{% set x = x ~ x %}",
    "{% macro m(a) %}{{ m(a) }}{% endmacro %}{{ m(1) }}",
    "{% include 'chat_template.jinja' %}",
    "{% import 'chat_template.jinja' as again %}",
    "{% extends 'chat_template.jinja' %}",
    "{% block a %}{{ self.a() }}{% endblock %}",
    "{%- break %}",
    "{%- continue -%}",
    "{# a",
    "{% raw %}",
    "| sort(attribute='content') | map(attribute='role') | join(',')",
    "| batch(0) | slice(0) | list",
    "[9223372036854775807:-9223372036854775808:0]",
    ".split('').strip().items().get(0)",
];

/// Returns `template` after removing, adding or changing some of its words. Some added words come from the template `other`.
pub fn broken(template: &str, other: &str, random: &mut StdRng) -> String {
    let (mut words, other) = (words(template), words(other));
    let (from, to) = stretch(words.len(), random);
    match random.random_range(0..7) {
        0 => drop(words.drain(from..to)),
        1 => {
            let again = words[from..to].to_vec();
            words.splice(from..from, again);
        }
        2 => {
            let (start, end) = stretch(other.len(), random);
            words.splice(from..to, other[start..end].iter().cloned());
        }
        3 => {
            // A loop is put around the words `from..to`. The range may already contain a loop from an earlier mutation, so
            // loops may be nested.
            words.insert(to, "{% endfor %}".into());
            words.insert(
                from,
                format!("{{% for i in range({}) %}}", json::number(random)),
            );
        }
        4 => {
            let digits = |word: &&mut String| word.bytes().all(|byte| byte.is_ascii_digit());
            if let Some(word) = words[from..].iter_mut().find(digits) {
                *word = json::number(random).to_string();
            }
        }
        _ => words.insert(
            from,
            WORDS
                .choose(random)
                .expect("WORDS is not empty")
                .to_string(),
        ),
    }
    words.concat()
}

/// Splits a text into words. A word is a run of letters and digits, a run of spaces, or a single sign. Joining the
/// words gives the text again. No word is empty.
fn words(text: &str) -> Vec<String> {
    let kind = |character: char| match character {
        _ if character.is_alphanumeric() => 0,
        _ if character.is_whitespace() => 1,
        _ => 2,
    };
    let mut words: Vec<String> = Vec::new();
    let mut last = None;
    for character in text.chars() {
        let this = kind(character);
        match words.last_mut() {
            Some(word) if last == Some(this) && this != 2 => word.push(character),
            _ => words.push(character.into()),
        }
        last = Some(this);
    }
    words
}
