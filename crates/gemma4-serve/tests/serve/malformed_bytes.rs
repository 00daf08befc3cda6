//! Tests requests whose bytes are changed at random. The server must answer each of them, or refuse it with an error in
//! the form of its API.

use crate::adapters::{adapters, with_root};
use crate::cases::case;
use crate::harness::with_model;
use crate::malformed_fields::{checked, post, send};
use rand::{Rng, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};

/// The number of changed requests.
const REQUESTS: usize = 800;

/// Returns the path and the body of a valid request.
fn valid(rng: &mut StdRng) -> (&'static str, Vec<u8>) {
    let mut drawn = case(rng);
    let (path, body) = match rng.random_range(0..10) {
        0 => (
            "/v1/load_lora_adapter",
            json!({"lora_name": "new", "lora_path": "one", "load_inplace": false}),
        ),
        1 => ("/v1/unload_lora_adapter", json!({"lora_name": "new"})),
        2 => {
            while drawn.path != "/v1/messages" {
                drawn = case(rng);
            }
            let fields = drawn.body.as_object_mut().expect("an object");
            fields.retain(|name, _| ["messages", "tools", "thinking"].contains(&name.as_str()));
            ("/v1/messages/count_tokens", with_model(drawn.body))
        }
        _ => (drawn.path, with_model(drawn.body)),
    };
    (path, body.to_string().into_bytes())
}

/// Changes one to three places of a body.
fn change(rng: &mut StdRng, body: &mut Vec<u8>) {
    const PARTS: [&[u8]; 14] = [
        b"\"", b"{", b"}", b"[", b"]", b",", b":", b"null", b"-1", b"1e999", b"\\u0000", b"\xff",
        b"true", b"[[]]",
    ];
    for _ in 0..rng.random_range(1..=3) {
        let at = rng.random_range(0..=body.len());
        let end = (at + rng.random_range(0..6)).min(body.len());
        match rng.random_range(0..4) {
            0 => drop(body.drain(at..end)),
            1 => body.truncate(at),
            2 => {
                let part = PARTS.choose(rng).expect("a part");
                body.splice(at..end, part.iter().copied());
            }
            _ => {
                let copy = body[at..end].to_vec();
                let to = rng.random_range(0..=body.len());
                body.splice(to..to, copy);
            }
        }
    }
}

#[tokio::test]
async fn requests_with_random_changes_are_answered_or_refused_in_the_form_of_the_api() {
    let root = adapters([("one", 2, 1)]);
    let harness = with_root(&root, 4, 1);
    let mut rng = StdRng::seed_from_u64(5);
    let mut refused = BTreeMap::<&str, BTreeSet<Vec<u8>>>::new();
    for _ in 0..REQUESTS {
        let (path, mut body) = valid(&mut rng);
        change(&mut rng, &mut body);
        let shown = String::from_utf8_lossy(&body).into_owned();
        let answer = send(&harness, post(path, body.clone())).await;
        if answer.status == 200 {
            continue;
        }
        let status = answer.status.as_u16();
        assert!(
            [400, 404].contains(&status),
            "{path} {shown}: {status}: {}",
            answer.text
        );
        checked(path, &answer);
        refused.entry(path).or_default().insert(body);
    }
    let counts: Vec<_> = refused
        .iter()
        .map(|(path, bodies)| (path, bodies.len()))
        .collect();
    let count: usize = counts.iter().map(|(_, count)| count).sum();
    println!("{count} different requests were refused: {counts:?}");
    assert!(count >= 300 && counts.len() == 7, "{counts:?}");
    for name in ["queued_requests", "prefilling_requests", "running_answers"] {
        harness.wait_for(&format!("gemma4_{name}"), 0.0).await;
    }
    assert_eq!(harness.get("/health").await.status, 200);
}
