//! Tests runs with wrong folders and wrong arguments. Each run prints one line that names the problem. The exit code is 1 for a
//! wrong folder and 2 for a wrong argument.

use super::folder::{Folder, Stored};
use super::{Ended, gemma4, run};
use safetensors::tensor::Dtype;
use serde_json::json;
use std::io::Write;
use std::process::Stdio;

const TENSOR: &str = "model.layers.1.mlp.up_proj.weight";

/// Checks that a program exited with `code` and printed exactly one error, which contains all `words`.
#[track_caller]
pub fn check(what: &str, ended: &Ended, code: i32, words: &[&str]) {
    let report = format!("{what}: {ended:?}");
    assert_eq!(ended.code, Some(code), "{report}");
    let errors: Vec<&str> = ended
        .stderr
        .lines()
        .filter(|line| line.starts_with("error: "))
        .collect();
    let [error] = errors[..] else {
        panic!("expected exactly one error: {report}");
    };
    for word in words {
        assert!(error.contains(word), "{word:?} is missing: {report}");
    }
    assert!(!ended.stderr.contains("panicked"), "{report}");
    assert!(ended.stdout.is_empty(), "{report}");
}

fn generate(folder: &Folder, arguments: &[&str]) -> Ended {
    let mut command = gemma4("run");
    command
        .args(["--device", "flex", "--model"])
        .arg(folder.path())
        .args(arguments);
    run(&mut command)
}

/// Changes a checkpoint folder by calling `spoil`, and checks that the folder is refused with exit code 1.
#[track_caller]
fn check_folder(what: &str, spoil: impl FnOnce(&Folder), words: &[&str]) {
    let folder = Folder::copy("dense-ple");
    spoil(&folder);
    check(what, &generate(&folder, &["--prompt", "hi"]), 1, words);
}

#[test]
fn program_model_path_that_is_no_folder_is_refused() {
    let folder = Folder::copy("dense-ple");
    let file = folder.file("config.json");
    for (path, code, words) in [
        (
            folder.file("absent"),
            2,
            ["--model", "absent", "no such file or folder"],
        ),
        (file, 1, ["config.json", "config.json", "Not a directory"]),
    ] {
        for name in ["run", "chat"] {
            let mut command = gemma4(name);
            command.args(["--device", "flex", "--model"]).arg(&path);
            if name == "run" {
                command.args(["--prompt", "hi"]);
            }
            check("no folder", &run(&mut command), code, &words);
        }
    }
}

#[test]
fn program_missing_file_is_refused_by_name() {
    for file in ["config.json", "tokenizer.json", "model.safetensors"] {
        check_folder(
            "missing file",
            |folder| folder.remove(file),
            &[file, "No such file"],
        );
    }
}

#[test]
fn program_malformed_file_is_refused_by_name() {
    for file in [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "model.safetensors",
        "model.safetensors.index.json",
    ] {
        for contents in ["", "{\"this\": ends", "\u{0}\u{1}"] {
            let spoil = |folder: &Folder| {
                // The index counts only without a single file.
                if file.ends_with("index.json") {
                    folder.remove("model.safetensors");
                }
                folder.write(file, contents);
            };
            check_folder(contents, spoil, &[file]);
        }
    }
    let half_a_block = |folder: &Folder| folder.write("chat_template.jinja", "{% if");
    check_folder(
        "template",
        half_a_block,
        &["chat_template.jinja", "syntax error"],
    );
}

#[test]
fn program_config_of_another_model_is_refused() {
    for (field, value, words) in [
        ("model_type", json!("llama"), ["model_type", "llama"]),
        ("hidden_size", json!("wide"), ["config.json", "wide"]),
        ("num_hidden_layers", json!(0), ["config.json", "0"]),
        (
            "layer_types",
            json!(["linear_attention"]),
            ["layer_types", ""],
        ),
    ] {
        let set = |folder: &Folder| folder.set("config.json", field, value);
        check_folder(field, set, &words);
    }
}

/// A terminal obeys control characters. The programs therefore escape the control characters that a checkpoint contains.
#[test]
fn program_control_characters_of_files_are_escaped() {
    let hostile = "\u{1b}]0;owned\u{7}\u{1b}[2J\u{9b}2Jx";
    let escaped = r"\u{1b}]0;owned\u{7}\u{1b}[2J\u{9b}2Jx";
    let add = |folder: &Folder| {
        folder.edit(|tensors| {
            let tensor = tensors[TENSOR].clone();
            tensors.insert(format!("model.{hostile}"), tensor);
        });
    };
    type Spoil<'a> = Box<dyn Fn(&Folder) + 'a>;
    let spoils: [(&str, Spoil<'_>); 6] = [
        ("tensor", Box::new(add)),
        (
            "model_type",
            Box::new(|folder| folder.set("config.json", "model_type", hostile)),
        ),
        (
            "hidden_activation",
            Box::new(|folder| folder.set("config.json", "hidden_activation", hostile)),
        ),
        (
            "a key",
            Box::new(|folder| folder.set("config.json", "rope_parameters", json!({hostile: 3}))),
        ),
        (
            "defaults",
            Box::new(|folder| folder.set("generation_config.json", "top_p", hostile)),
        ),
        (
            "shards",
            Box::new(|folder| {
                folder.remove("model.safetensors");
                let index = json!({"weight_map": {"a": hostile}});
                folder.write("model.safetensors.index.json", index.to_string());
            }),
        ),
    ];
    for (what, spoil) in spoils {
        let folder = Folder::copy("dense-ple");
        spoil(&folder);
        let ended = generate(&folder, &["--prompt", "hi"]);
        check(what, &ended, 1, &[]);
        let obeyed = |one: char| one.is_control() && one != '\n';
        assert!(!ended.stderr.contains(obeyed), "{what}: {:?}", ended.stderr);
        assert!(ended.stderr.contains(escaped), "{what}: {:?}", ended.stderr);
    }
}

/// An unsupported generation default gives a warning, and the text is generated without this default.
#[test]
fn program_unsupported_generation_default_is_warned_of() {
    let folder = Folder::copy("dense-ple");
    let quick = ["--prompt", "hi", "--temperature", "0", "--max-tokens", "2"];
    let silent = generate(&folder, &quick);
    assert!(!silent.stderr.contains("warning"), "{silent:?}");
    folder.set("generation_config.json", "no_repeat_ngram_size", 2);
    folder.set("generation_config.json", "num_beams", 1);
    let told = generate(&folder, &quick);
    assert_eq!(
        (told.code, &told.stdout),
        (Some(0), &silent.stdout),
        "{told:?}"
    );
    let warnings: Vec<&str> = told
        .stderr
        .lines()
        .filter(|line| line.starts_with("warning: "))
        .collect();
    let [warning] = warnings[..] else {
        panic!("{told:?}");
    };
    assert!(
        warning.contains("generation_config.json: no_repeat_ngram_size is 2"),
        "{warning}"
    );
}

#[test]
fn program_generation_default_out_of_range_is_refused() {
    for (field, value) in [
        ("temperature", json!(-1.0)),
        ("top_p", json!(2.0)),
        ("min_p", json!(2.0)),
        ("repetition_penalty", json!(0)),
        ("stop_strings", json!("")),
        ("max_new_tokens", json!(0)),
    ] {
        let set = |folder: &Folder| folder.set("generation_config.json", field, value);
        check_folder(field, set, &["generation_config.json", field]);
    }
}

#[test]
fn program_truncated_weights_are_refused() {
    for share in [0.001, 0.5, 0.999] {
        let cut = |folder: &Folder| {
            let whole = folder.read("model.safetensors");
            let kept = (whole.len() as f64 * share) as usize;
            folder.write("model.safetensors", &whole[..kept]);
        };
        check_folder("cut off", cut, &["model.safetensors"]);
    }
}

#[test]
fn program_wrong_tensor_is_refused_by_name() {
    let absent = |folder: &Folder| folder.edit(|tensors| drop(tensors.remove(TENSOR)));
    check_folder("absent", absent, &[TENSOR, "missing"]);

    let renamed = |folder: &Folder| {
        folder.edit(|tensors| {
            let tensor = tensors.remove(TENSOR).expect("the tensor exists");
            tensors.insert("model.layers.1.mlp.other.weight".into(), tensor);
        });
    };
    let both = [TENSOR, "model.layers.1.mlp.other.weight"];
    check_folder("renamed", renamed, &both);

    let flattened = |folder: &Folder| {
        folder.edit(|tensors| {
            let tensor = tensors.get_mut(TENSOR).expect("the tensor exists");
            tensor.shape = vec![tensor.shape.iter().product()];
        });
    };
    check_folder("flattened", flattened, &[TENSOR, "[6144]", "[96, 64]"]);

    let whole_numbers = |folder: &Folder| {
        folder.edit(|tensors| {
            let tensor = tensors.get_mut(TENSOR).expect("the tensor exists");
            tensor.dtype = Dtype::I32;
        });
    };
    check_folder("whole numbers", whole_numbers, &[TENSOR, "I32"]);

    let another = |folder: &Folder| {
        folder.edit(|tensors| {
            let tensor = Stored {
                dtype: Dtype::F32,
                shape: vec![2],
                bytes: vec![0; 8],
            };
            tensors.insert("model.adapter.weight".into(), tensor);
        });
    };
    check_folder("another", another, &["model.adapter.weight"]);
}

#[test]
fn program_index_with_a_wrong_file_is_refused() {
    for (file, words) in [
        ("model-00001-of-00001.safetensors", "No such file"),
        ("../model.safetensors", "not the name of a file"),
    ] {
        let index = |folder: &Folder| {
            folder.remove("model.safetensors");
            let index = json!({"weight_map": {TENSOR: file}});
            folder.write("model.safetensors.index.json", index.to_string());
        };
        check_folder("index", index, &[file, words]);
    }
}

#[test]
fn program_conversation_refused_by_the_template_ends_with_its_reason() {
    let folder = Folder::copy("dense-ple");
    folder.write(
        "chat_template.jinja",
        "{{ raise_exception('no such roles') }}",
    );
    let ended = generate(&folder, &["--chat", "--prompt", "hi"]);
    check("refused", &ended, 1, &["chat template", "no such roles"]);
}

#[test]
fn program_template_without_end_is_refused() {
    for (template, words) in [
        (
            "{{ messages | tojson(indent=10**12) }}",
            ["tojson", "indent"],
        ),
        (
            "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
            ["instructions", "chat_template.jinja:1"],
        ),
    ] {
        let folder = Folder::copy("dense-ple");
        folder.write(
            "tokenizer_config.json",
            json!({"chat_template": template}).to_string(),
        );
        let ended = generate(&folder, &["--chat", "--prompt", "hi"]);
        check(template, &ended, 1, &["chat template", words[0], words[1]]);
    }
}

#[test]
fn program_wrong_argument_is_refused_by_name() {
    let folder = Folder::copy("dense-ple");
    for (arguments, words) in [
        (&["--device", "toaster"][..], &["toaster", "--device"][..]),
        (&["--dtype", "int4"], &["int4", "--dtype"]),
        (&["--temperature", "-1"], &["-1", "--temperature"]),
        (&["--temperature", "NaN"], &["NaN", "--temperature"]),
        (&["--temperature", "hot"], &["hot", "--temperature"]),
        (&["--top-p", "2"], &["2", "--top-p"]),
        (&["--top-p", "0"], &["0", "--top-p"]),
        (&["--top-k", "0"], &["0", "--top-k"]),
        (&["--min-p", "2"], &["2", "--min-p"]),
        (&["--min-p", "-1"], &["-1", "--min-p"]),
        (
            &["--repetition-penalty", "0"],
            &["0", "--repetition-penalty"],
        ),
        (
            &["--repetition-penalty", "x"],
            &["x", "--repetition-penalty"],
        ),
        (&["--stop", ""], &["--stop"]),
        (&["--logprobs", "-1"], &["-1", "--logprobs"]),
        (&["--thinking", "maybe"], &["maybe", "--thinking"]),
        (&["--max-tokens", "0"], &["0", "--max-tokens"]),
        (&["--max-tokens", "-3"], &["-3", "--max-tokens"]),
        (&["--seed", "-1"], &["-1", "--seed"]),
        (&["--max-token", "3"], &["--max-token"]),
        (&["loose"], &["loose"]),
    ] {
        let mut all = vec!["--prompt", "hi"];
        all.extend(arguments);
        let mut command = gemma4("run");
        check(
            arguments[0],
            &run(command.arg("--model").arg(folder.path()).args(all)),
            2,
            words,
        );
    }
}

#[test]
fn program_wrong_prompt_is_refused() {
    let folder = Folder::copy("dense-ple");
    let long = vec!["3"; 600].join(",");
    for (arguments, words) in [
        (&["--prompt", ""][..], &["prompt", "empty"][..]),
        (&["--prompt", "-"], &["prompt", "empty"]),
        (&[], &["prompt", "empty"]),
        (&["--chat"], &["prompt", "empty"]),
        (&["--prompt-tokens", ""], &["--prompt-tokens"]),
        (&["--prompt-tokens", "2,x"], &["--prompt-tokens", "x"]),
        (&["--prompt-tokens", "2,-1"], &["--prompt-tokens", "-1"]),
        (&["--prompt-tokens", "2,320"], &["320", "vocabulary"]),
        (&["--prompt-tokens", &long], &["600", "512"]),
        (
            &["--prompt-tokens", "2", "--prompt", "hi"],
            &["--prompt-tokens", "--prompt"],
        ),
        (
            &["--prompt-tokens", "2", "--chat"],
            &["--prompt-tokens", "--chat"],
        ),
        (
            &["--prompt-tokens", "2", "--thinking", "on"],
            &["--prompt-tokens", "--thinking"],
        ),
    ] {
        check("prompt", &generate(&folder, arguments), 2, words);
    }
}

#[test]
fn program_input_that_is_not_utf8_is_refused() {
    let folder = Folder::copy("dense-ple");
    for name in ["run", "chat"] {
        let mut command = gemma4(name);
        command
            .args(["--device", "flex", "--model"])
            .arg(folder.path());
        let mut child = command
            .stdin(Stdio::piped())
            .spawn()
            .expect("the process starts");
        let mut input = child.stdin.take().expect("stdin is piped");
        input
            .write_all(b"\xff\xfe\n")
            .expect("the process reads its input");
        drop(input);
        let ended = child.wait_with_output().expect("the process ends").into();
        check(name, &ended, 2, &["standard input", "UTF-8"]);
    }
}

#[test]
fn program_device_not_built_is_refused() {
    // No build has both `cuda` and `metal`, so at least one of the two devices is missing.
    let absent = [
        ("cuda", cfg!(feature = "cuda")),
        ("metal", cfg!(feature = "metal")),
    ];
    for (device, _) in absent.into_iter().filter(|(_, is_built)| !is_built) {
        let ended = run(gemma4("run").args(["--prompt", "hi", "--device", device]));
        check(device, &ended, 1, &["built without", device]);
    }
}

#[test]
fn program_wrong_drafter_is_refused() {
    let folder = Folder::copy("dense-keqv");
    let drafter = crate::fixture::folder("assistant-ple");
    let drafter = drafter.to_str().expect("the path is UTF-8");
    for (arguments, code, words) in [
        (
            &["--draft", drafter][..],
            2,
            ["drafter", "num_key_value_heads"],
        ),
        (
            &["--draft", "./no/such"],
            2,
            ["--draft: ./no/such", "no such file or folder"],
        ),
        (
            &[
                "--draft",
                folder.path().to_str().expect("the path is UTF-8"),
            ],
            1,
            ["model_type", "no drafter's"],
        ),
        (
            &["--lookup", "--draft-tokens", "9"],
            2,
            ["draft_tokens", "9"],
        ),
        (
            &["--lookup", "--draft-tokens", "0"],
            2,
            ["--draft-tokens", "at least 1"],
        ),
        (
            &["--lookup", "--draft", drafter],
            2,
            ["--lookup", "--draft"],
        ),
    ] {
        let arguments = [&["--prompt", "hi"], arguments].concat();
        check("drafts", &generate(&folder, &arguments), code, &words);
    }
}
