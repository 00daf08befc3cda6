//! Tests of a pool's events and of its end.

use super::{AnswerOptions, Engine, EngineOptions, EnginePool, Event, PoolEnd, Request};
use crate::testing::{answer_options, gemma};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::timeout;

/// Returns a request for `choices` answers of `max_tokens` tokens.
fn request(prompt: Vec<u32>, choices: usize, max_tokens: usize) -> Request {
    Request {
        prompt: prompt.into(),
        choices,
        options: AnswerOptions {
            max_tokens,
            ignore_stop_tokens: true,
            ..answer_options()
        },
        constraint: None,
        adapter: None,
        media_memory: None,
    }
}

fn start(devices: usize, options: &EngineOptions) -> (EnginePool, PoolEnd) {
    let models = (0..devices).map(|number| (format!("flex:{number}"), gemma()));
    EnginePool::start(models.collect(), options).expect("the engines start")
}

#[tokio::test]
async fn events_end_after_the_last_answer_and_after_a_failure() {
    for devices in [1, 2] {
        let (pool, _end) = start(devices, &EngineOptions::default());
        let mut events = pool.submit(request(vec![5, 6, 7], 3, 4)).expect("a place");
        let mut ends = 0;
        while let Some(event) = events.next().await {
            ends += usize::from(matches!(event, Event::End { .. }));
        }
        assert_eq!(ends, 3);
        assert_eq!(events.next().await, None);
    }
    let (engine, outcome) = Engine::that_panics(1, "kernel 3 failed");
    let pool = EnginePool::of(vec![("a".into(), engine, outcome)]);
    let (pool, _end) = pool.expect("one engine has no metrics of its own");
    let mut events = pool.submit(request(vec![1], 1, 4)).expect("a place");
    assert!(matches!(events.next().await, Some(Event::Text { .. })));
    assert!(matches!(events.next().await, Some(Event::Failed(_))));
    assert_eq!(events.next().await, None);
}

#[tokio::test]
async fn failure_of_any_of_many_engines_ends_the_pool_at_once() {
    let (healthy, _) = Engine::that_panics(1, "no request reaches this engine");
    let (mut open, mut started) = (Vec::new(), Vec::new());
    for number in 0..40 {
        let (sender, outcome) = oneshot::channel();
        open.push(sender);
        started.push((format!("cuda:{number}"), healthy.clone(), outcome));
    }
    let (_pool, end) = EnginePool::of(started).expect("the metrics are valid");
    let failing = open.remove(35);
    failing
        .send(Err("kernel 3 failed".into()))
        .expect("the pool waits");
    // The other engines run on.
    let ended = timeout(Duration::from_secs(60), end).await;
    assert_eq!(ended, Ok(Err("cuda:35: kernel 3 failed".into())));
}

#[tokio::test]
async fn cancelled_request_whose_prompt_was_not_read_attracts_no_other_request() {
    let (pool, _end) = start(2, &EngineOptions::default());
    let prompt: Vec<u32> = (0..8000).map(|index| 100 + index * 31 % 1800).collect();
    let events = pool.submit(request(prompt.clone(), 1, 4)).expect("a place");
    drop(events);
    let cancelled = |text: &str| {
        let lines = text.lines();
        let lines = lines.filter(|line| line.contains("outcome=\"cancelled\""));
        lines.filter(|line| line.ends_with(" 1")).count()
    };
    for _ in 0..4000 {
        if cancelled(&pool.metrics_text()) == 1 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(cancelled(&pool.metrics_text()), 1);
    let mut events = pool
        .submit(request(prompt[..100].to_vec(), 1, 2))
        .expect("a place");
    while events.next().await.is_some() {}
    let text = pool.metrics_text();
    let followed = text
        .lines()
        .filter(|line| line.contains("reason=\"prefix\""));
    assert!(
        followed.into_iter().all(|line| line.ends_with(" 0")),
        "{text}"
    );
}
