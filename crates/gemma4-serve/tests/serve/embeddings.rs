//! Tests the server of an embedding model: OpenAI's form of requests and errors, the queue, clients that leave, and the
//! shutdown.

use crate::harness::{Answer, Harness, MODEL, post};
use crate::pictures::folder;
use axum::Router;
use axum::body::Body;
use axum::http::{Request, StatusCode};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use burn::tensor::Device;
use burn_gemma4::{EmbedOptions, EmbeddingGemma};
use gemma4_serve::engine::{EmbeddingEngine, EmbeddingEngineOptions, EmbeddingRequest};
use gemma4_serve::{EmbeddingServer, ErrorKind, ServerOptions};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tower::ServiceExt;

const PATH: &str = "/v1/embeddings";

fn model() -> EmbeddingGemma {
    EmbeddingGemma::from_pretrained(folder("embedding"), &Device::flex()).expect("it loads")
}

fn queue_of(max_queue: usize) -> EmbeddingEngineOptions {
    EmbeddingEngineOptions {
        max_queue,
        ..EmbeddingEngineOptions::default()
    }
}

fn server(options: ServerOptions) -> EmbeddingServer {
    let options = ServerOptions {
        model: MODEL.into(),
        ..options
    };
    EmbeddingServer::new(model(), queue_of(4), options).expect("the options are valid")
}

async fn send(router: &Router, request: Request<Body>) -> Answer {
    let response = router.clone().oneshot(request).await.expect("infallible");
    let (parts, body) = response.into_parts();
    let bytes = body.collect().await.expect("the body ends").to_bytes();
    Answer {
        status: parts.status,
        headers: parts.headers,
        text: String::from_utf8(bytes.to_vec()).expect("UTF-8"),
    }
}

async fn embed(router: &Router, mut body: Value) -> Answer {
    if body.get("model").is_none() {
        body["model"] = json!(MODEL);
    }
    send(router, post(PATH, &body)).await
}

/// Returns the embeddings of a response, in the order of their indices.
fn embeddings(answer: &Answer) -> Vec<Vec<f32>> {
    let json = answer.ok();
    assert_eq!(
        (&json["object"], &json["model"]),
        (&json!("list"), &json!(MODEL))
    );
    let items = json["data"].as_array().expect("a list").iter().enumerate();
    let items = items.map(|(index, item)| {
        assert_eq!(
            (&item["object"], &item["index"]),
            (&json!("embedding"), &json!(index))
        );
        let numbers = item["embedding"].as_array().expect("a list").iter();
        let numbers = numbers.map(|number| number.as_f64().expect("a number") as f32);
        numbers.collect()
    });
    items.collect()
}

fn assert_close(found: &[Vec<f32>], expected: &[Vec<f32>]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert_eq!(found.len(), expected.len());
        let mut pairs = found.iter().zip(expected);
        assert!(
            pairs.all(|(a, b)| (a - b).abs() < 1e-5),
            "{found:?} {expected:?}"
        );
    }
}

#[tokio::test]
async fn embeddings_are_those_of_the_model_in_each_form_of_the_input() {
    let server = server(ServerOptions::default());
    let router = server.router();
    let model = model();
    let texts = ["the cat", "an owl in the garden", "x"];
    let options = EmbedOptions::new();
    let tokens = texts.map(|text| model.tokens(text, &options).expect("the text encodes"));
    let expected = model.embed(&texts, &options).expect("the texts embed");
    let all: usize = tokens.iter().map(Vec::len).sum();

    for (input, expected, count) in [
        (json!(texts), &expected[..], all),
        (json!(tokens), &expected[..], all),
        (json!(texts[0]), &expected[..1], tokens[0].len()),
        (json!(tokens[0]), &expected[..1], tokens[0].len()),
    ] {
        let answer = embed(&router, json!({"input": input, "user": "someone"})).await;
        assert_close(&embeddings(&answer), expected);
        let usage = json!({"prompt_tokens": count, "total_tokens": count});
        assert_eq!(answer.json()["usage"], usage);
        assert!(answer.headers.contains_key("x-request-id"));
    }

    let query = EmbedOptions::new().prompt("query").dimensions(16);
    let expected = model.embed(&texts, &query).expect("the texts embed");
    let body = json!({"input": texts, "dimensions": 16, "prompt_name": "query", "encoding_format": "float"});
    assert_close(&embeddings(&embed(&router, body).await), &expected);
    let body = json!({"input": texts, "dimensions": 16, "prompt_name": "query", "encoding_format": "base64"});
    let answer = embed(&router, body).await.ok();
    let decoded = answer["data"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|item| {
            let text = item["embedding"].as_str().expect("a text");
            let bytes = STANDARD.decode(text).expect("base64");
            let numbers = bytes.as_chunks::<4>().0.iter();
            numbers.map(|bytes| f32::from_le_bytes(*bytes)).collect()
        });
    assert_close(&decoded.collect::<Vec<Vec<f32>>>(), &expected);

    let long = "x ".repeat(300);
    let answer = embed(&router, json!({"input": long, "truncate": true})).await;
    assert_eq!(answer.ok()["usage"]["total_tokens"], 96);
}

#[tokio::test]
async fn invalid_requests_are_refused_in_the_form_of_openai() {
    let server = server(ServerOptions::default());
    let router = server.router();
    let long = "x ".repeat(300);
    let many = vec!["x"; 2049];
    for (body, field, part) in [
        (json!({"input": ""}), "input", "input[0]: is empty"),
        (json!({"input": ["x", ""]}), "input", "input[1]: is empty"),
        (json!({"input": []}), "input", "at least 1 text"),
        (
            json!({"input": [[2], []]}),
            "input",
            "input[1]: has no tokens",
        ),
        (json!({"input": [[2, 320]]}), "input", "320"),
        (json!({"input": many}), "input", "2048"),
        (json!({"input": ["x", long]}), "input", "input[1]"),
        (json!({"input": 7}), "input", "expected a text"),
        (
            json!({"input": [{"type": "image_url"}]}),
            "input",
            "expected a text",
        ),
        (json!({"input": "x", "dimensions": 0}), "dimensions", "48"),
        (json!({"input": "x", "dimensions": 49}), "dimensions", "48"),
        (
            json!({"input": "x", "encoding_format": "hex"}),
            "encoding_format",
            "hex",
        ),
        (
            json!({"input": "x", "prompt_name": "Poem"}),
            "prompt_name",
            "Document",
        ),
        (
            json!({"input": [2], "prompt_name": "query"}),
            "prompt_name",
            "tokens",
        ),
        (
            json!({"input": "x", "temperature": 1}),
            "temperature",
            "unknown field",
        ),
    ] {
        let answer = embed(&router, body.clone()).await;
        let error = &answer.json()["error"];
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{body}: {error}");
        assert_eq!(error["type"], "invalid_request_error", "{body}");
        assert_eq!(error["param"], field, "{body}: {error}");
        let message = error["message"].as_str().expect("a message");
        assert!(message.contains(part), "{body}: {message}");
    }
    let answer = embed(&router, json!({"model": "other", "input": "x"})).await;
    assert_eq!(answer.status, StatusCode::NOT_FOUND);
    assert_eq!(answer.json()["error"]["param"], "model");
}

#[tokio::test]
async fn servers_refuse_the_requests_of_the_other_kind() {
    let embedding = server(ServerOptions::default());
    let router = embedding.router();
    for path in [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
    ] {
        let answer = send(&router, post(path, &json!({"model": MODEL}))).await;
        assert_eq!(answer.status, StatusCode::NOT_FOUND, "{path}");
        let message = answer.json()["error"]["message"].to_string();
        assert!(message.contains("generates no text"), "{message}");
    }
    let chat = Harness::plain();
    let body = json!({"model": MODEL, "input": "x"});
    let answer = chat.post(PATH, &body).await;
    assert_eq!(answer.status, StatusCode::NOT_FOUND);
    let message = answer.json()["error"]["message"].to_string();
    assert!(message.contains("embedding model"), "{message}");
}

#[tokio::test]
async fn keys_models_health_and_metrics_are_served() {
    let server = server(ServerOptions {
        api_keys: vec!["secret".into()],
        ..ServerOptions::default()
    });
    let router = server.router();
    let answer = embed(&router, json!({"input": "x"})).await;
    assert_eq!(answer.status, StatusCode::UNAUTHORIZED);
    let get = async |path: &str| {
        let request = Request::get(path).header("authorization", "Bearer secret");
        send(&router, request.body(Body::empty()).expect("a request")).await
    };
    let models = get("/v1/models").await.ok();
    assert_eq!(models["data"][0]["id"], MODEL);
    assert_eq!(models["data"][0]["embedding_dim"], 48);
    assert_eq!(models["data"][0]["max_model_len"], 96);
    assert_eq!(get("/v1/models/tiny").await.ok(), models["data"][0]);
    assert_eq!(get("/v1/models/other").await.status, StatusCode::NOT_FOUND);
    assert_eq!(get("/health").await.ok(), json!({"status": "ok"}));

    let mut request = post(PATH, &json!({"model": MODEL, "input": ["x", "y"]}));
    let key = "Bearer secret".parse().expect("a header");
    request.headers_mut().insert("authorization", key);
    assert_eq!(send(&router, request).await.status, StatusCode::OK);
    let metrics = get("/metrics").await.text;
    assert!(
        metrics.contains("gemma4_embedded_texts_total 2"),
        "{metrics}"
    );
    let finished = "gemma4_requests_total{outcome=\"finished\"} 1";
    assert!(metrics.contains(finished), "{metrics}");
}

/// Texts of several requests share passes. A full queue refuses further requests, and requests of clients that have left
/// do not run.
#[tokio::test]
async fn engine_packs_requests_and_limits_its_queue() {
    let model = model();
    let options = EmbedOptions::new();
    let tokens = |text: &str| model.tokens(text, &options).expect("the text encodes");
    let request = |texts: Vec<Vec<u32>>| EmbeddingRequest {
        texts,
        dimensions: None,
        memory: (),
    };
    let (engine, end) = EmbeddingEngine::start(vec![("cpu".into(), model.clone())], queue_of(2))
        .expect("it starts");
    // Passes over many long texts keep the thread busy while further requests arrive.
    let long = vec![tokens(&"x ".repeat(47)); 2000];
    let mut busy = Vec::new();
    let refused = loop {
        match engine.submit(request(long.clone())) {
            Ok(embeddings) => busy.push(Box::pin(embeddings)),
            Err(error) => break error,
        }
        assert!(busy.len() < 50, "the queue has a limit");
    };
    assert_eq!(refused.kind, ErrorKind::Busy, "{refused}");
    // Two clients leave, and their places become free.
    busy.truncate(1);
    let short = loop {
        match engine.submit(request(vec![tokens("the cat")])) {
            Ok(embeddings) => break embeddings,
            Err(error) => assert_eq!(error.kind, ErrorKind::Busy, "{error}"),
        }
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    };
    let expected = model
        .embed(&["the cat"], &options)
        .expect("the text embeds");
    assert_close(&short.await.expect("the text embeds"), &expected);
    busy.clear();
    engine.drain();
    let error = engine.submit(request(vec![tokens("x")])).err();
    assert_eq!(error.expect("the engine drains").kind, ErrorKind::Draining);
    assert_eq!(end.await, Ok(()));
    let metrics = engine.metrics_text();
    assert!(metrics.contains("outcome=\"cancelled\""), "{metrics}");
    assert!(metrics.contains("outcome=\"refused\""), "{metrics}");
}

#[tokio::test]
async fn engine_with_two_devices_embeds_all_texts() {
    let model = model();
    let models = vec![
        ("a".to_owned(), model.clone()),
        ("b".to_owned(), model.clone()),
    ];
    let (engine, end) = EmbeddingEngine::start(models, queue_of(64)).expect("it starts");
    assert_eq!(engine.devices(), ["a", "b"]);
    let options = EmbedOptions::new();
    let texts: Vec<String> = (0..40).map(|index| "owl ".repeat(index % 7 + 1)).collect();
    let expected = model.embed(&texts, &options).expect("the texts embed");
    let waiting = texts.chunks(5).map(|texts| {
        let tokens = texts.iter().map(|text| model.tokens(text, &options));
        engine.submit(EmbeddingRequest {
            texts: tokens.collect::<Result<_, _>>().expect("the texts encode"),
            dimensions: None,
            memory: (),
        })
    });
    let waiting: Vec<_> = waiting.collect();
    let mut found = Vec::new();
    for embeddings in waiting {
        let embeddings = embeddings.expect("the queue has a place").await;
        found.extend(embeddings.expect("the texts embed"));
    }
    assert_close(&found, &expected);
    engine.drain();
    assert_eq!(end.await, Ok(()));
}

#[tokio::test]
async fn context_limits_the_tokens_of_a_text() {
    let engine = |context: usize| EmbeddingEngineOptions {
        context,
        ..EmbeddingEngineOptions::default()
    };
    let options = || ServerOptions {
        model: MODEL.into(),
        ..ServerOptions::default()
    };
    let server = EmbeddingServer::new(model(), engine(16), options()).expect("it starts");
    let router = server.router();
    let long = "x ".repeat(40);
    for input in [json!(long), json!(vec![7; 17])] {
        let answer = embed(&router, json!({"input": input})).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST);
        let message = answer.json()["error"]["message"].to_string();
        assert!(message.contains("at most 16"), "{message}");
    }
    let answer = embed(&router, json!({"input": long, "truncate": true})).await;
    assert_eq!(answer.ok()["usage"]["total_tokens"], 16);
    // The checkpoint's limit stays.
    let server = EmbeddingServer::new(model(), engine(1000), options()).expect("it starts");
    assert_eq!(server.engine().model().max_tokens(), 96);
    let error = EmbeddingServer::new(model(), engine(2), options()).expect_err("no text fits");
    assert!(error.to_string().contains("context"), "{error}");
}

/// The memory of an answer counts until the answer is sent.
#[tokio::test]
async fn memory_of_answers_is_limited() {
    let server = server(ServerOptions {
        max_body: 1 << 18,
        body_memory: 2 << 20,
        body_timeout: std::time::Duration::from_millis(200),
        ..ServerOptions::default()
    });
    let router = server.router();
    // 2,000 embeddings of 48 elements take 1.5 MB, and the pool has 1 MiB for an answer.
    let answer = embed(&router, json!({"input": vec!["x"; 2000]})).await;
    assert_eq!(answer.status, StatusCode::PAYLOAD_TOO_LARGE);
    let message = answer.json()["error"]["message"].to_string();
    assert!(message.contains("answer"), "{message}");
    // One answer may take the part that answers share, and one the last part.
    let body = json!({"model": MODEL, "input": vec!["x"; 1000]});
    let send = async || {
        let response = router.clone().oneshot(post(PATH, &body)).await;
        response.expect("infallible")
    };
    let unsent = [send().await, send().await];
    let refused = send().await;
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    for response in unsent {
        assert_eq!(response.status(), StatusCode::OK);
        response.into_body().collect().await.expect("the body ends");
    }
    assert_eq!(send().await.status(), StatusCode::OK);
}

#[tokio::test]
async fn engine_ends_when_it_is_dropped() {
    let models = vec![("cpu".to_owned(), model())];
    let (engine, end) = EmbeddingEngine::start(models, queue_of(1)).expect("it starts");
    let tokens = vec![2, 7, 1];
    let request = EmbeddingRequest {
        texts: vec![tokens],
        dimensions: None,
        memory: (),
    };
    let embeddings = engine.submit(request).expect("the queue has a place");
    drop(engine);
    assert_eq!(embeddings.await.expect("the text embeds").len(), 1);
    assert_eq!(end.await, Ok(()));
}

#[tokio::test]
async fn shutdown_finishes_requests_and_refuses_new_ones() {
    let server = server(ServerOptions::default());
    let (router, engine) = (server.router(), server.engine().clone());
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let (shutdown, stopped) = oneshot::channel::<()>();
    let serving = tokio::spawn(server.serve(listener, async {
        let _ = stopped.await;
    }));
    let body = json!({"input": vec!["an owl in the garden"; 300]});
    let open = {
        let (router, body) = (router.clone(), body.clone());
        tokio::spawn(async move { embed(&router, body).await })
    };
    while engine
        .metrics_text()
        .contains("gemma4_embedding_passes_total 0")
    {
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    }
    shutdown.send(()).expect("the server runs");
    while !engine.is_draining() {
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    }
    let refused = embed(&router, body).await;
    assert_eq!(
        refused.status,
        StatusCode::SERVICE_UNAVAILABLE,
        "{}",
        refused.text
    );
    assert!(refused.headers.contains_key("retry-after"));
    let open = open.await.expect("the request ends");
    assert_eq!(open.ok()["data"].as_array().expect("a list").len(), 300);
    assert_eq!(serving.await.expect("the server ends"), Ok(()));
}
