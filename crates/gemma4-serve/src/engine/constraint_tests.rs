//! Tests of the limits of grammars, on a stack as small as that of the server's threads.

use super::constraint::{Grammar, Grammars};
use crate::error::{ErrorKind, RequestError};
use crate::testing::gemma;
use serde_json::{Map, Value, json};

/// The default stack size of a thread of tokio or of Rust, in bytes.
const STACK: usize = 2 << 20;

/// Compiles each grammar on a separate thread with a small stack, and then advances the grammar by the tokens of
/// `text`. The result for a grammar is its first error, if any.
fn follow(grammars: &[Grammar], text: &str) -> Vec<Result<(), RequestError>> {
    let gemma = gemma();
    let tokenizer = gemma.tokenizer();
    let factory = Grammars::new(tokenizer, 1).expect("the vocabulary is valid");
    let tokens = tokenizer.encode(text).expect("the text encodes");
    let follow_one = |grammar: &Grammar| {
        let mut constraint = factory.compile("field", grammar, None)?;
        for token in &tokens {
            let mut logits = vec![0.0; tokenizer.vocab_size()];
            constraint.apply(&mut logits, &[])?;
            constraint.record(*token)?;
        }
        constraint.apply(&mut vec![0.0; tokenizer.vocab_size()], &[])
    };
    let on_small_stack = |grammar| {
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(STACK);
            let thread = thread.spawn_scoped(scope, || follow_one(grammar));
            thread.expect("a thread").join().expect("no panic")
        })
    };
    grammars.iter().map(on_small_stack).collect()
}

fn chain(rules: usize) -> Grammar {
    let mut text = format!("start: r1\nr{rules}: \"a\"\n");
    for rule in 1..rules {
        text += &format!("r{rule}: r{}\n", rule + 1);
    }
    Grammar::Lark(text)
}

fn references(count: usize) -> Grammar {
    let define = |index: usize| {
        let next = format!("#/$defs/d{}", index + 1);
        let items = match index + 1 < count {
            true => json!({"type": "array", "items": {"$ref": next}}),
            false => json!({"type": "array"}),
        };
        (format!("d{index}"), items)
    };
    let definitions: Map<String, Value> = (0..count).map(define).collect();
    Grammar::JsonSchema(json!({"$defs": definitions, "$ref": "#/$defs/d0"}))
}

fn nested(depth: usize) -> Grammar {
    Grammar::Regex(format!("{}a{}", "(".repeat(depth), ")".repeat(depth)))
}

#[test]
fn grammars_at_the_limits_need_a_bounded_stack_and_beyond_are_refused() {
    // `chain(1999)` has 2,000 lines: one line for each rule, and the line for `start`.
    let at = [chain(1999), nested(200), references(300)];
    for result in follow(&at, "") {
        if let Err(error) = result {
            assert!(error.message.contains("too complex"), "{error}");
        }
    }
    let beyond = [
        (chain(2000), "field: has 2001 lines; expected at most 2000"),
        (
            nested(201),
            "field: has 201 nested brackets; expected at most 200",
        ),
        (
            references(301),
            "field: has 301 references; expected at most 300",
        ),
        (
            Grammar::Regex("a".repeat(300_000)),
            "field: has 300000 bytes; expected at most 262144",
        ),
    ];
    let (grammars, messages): (Vec<_>, Vec<_>) = beyond.into_iter().unzip();
    for (result, message) in follow(&grammars, "").into_iter().zip(messages) {
        let error = result.expect_err("the grammar is too large");
        assert_eq!(error.message, message);
    }
}

#[test]
fn grammar_that_becomes_too_complex_is_the_requests_fault() {
    let keys = (0..3000).map(|key| (format!("k{key}"), json!({"type": "string"})));
    let properties: Map<String, Value> = keys.collect();
    let schema = json!({"type": "object", "properties": properties});
    let error = follow(&[Grammar::JsonSchema(schema)], "{").remove(0);
    let error = error.expect_err("the grammar is too complex");
    assert_eq!(error.kind, ErrorKind::Invalid);
    assert_eq!(error.field.as_deref(), Some("field"));
    assert!(error.message.contains("is too complex"), "{error}");
    assert!(!error.message.contains('\n'), "{error}");
}
