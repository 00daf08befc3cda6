//! Tests that run the program `examples/gradcheck` with command line arguments.

use attention_workspace::testing::program::{Ended, example, run, succeed};

fn gradcheck(arguments: &[&str]) -> Ended {
    run(example("gradcheck")
        .args(["--device", "flex"])
        .args(arguments))
}

/// Splits the table that `gradcheck` prints into rows, and each row into columns.
fn rows(ended: &Ended) -> Vec<Vec<&str>> {
    let table = ended.stdout.lines().filter(|line| line.contains(" / "));
    table
        .map(|line| line.split_whitespace().collect())
        .collect()
}

#[test]
fn gradcheck_prints_a_row_per_requested_case() {
    let ended = succeed(example("gradcheck").args([
        "--device",
        "flex",
        "--head-sizes",
        "5,64",
        "--options",
        "causal,bias,sinks,all",
        "--dtypes",
        "f32,bf16",
        "--seed",
        "3",
    ]));
    let rows = rows(&ended);
    assert_eq!(rows.len(), 2 * 4 * 2, "{ended:?}");
    assert_eq!(rows[0][..4], ["5", "causal", "f32", "blocks"]);
    assert_eq!(rows[15][..4], ["64", "all", "bf16", "blocks"]);
    assert!(
        ended.stdout.contains("16 rows, all within tolerance"),
        "{ended:?}"
    );
    // A row of the table has five errors: those of the output, the logsumexp, dq, dk and dv. A row with a bias or sinks also
    // has the error of the bias gradient or the sink gradient.
    for (option, numbers) in [("causal", 5), ("bias", 6), ("sinks", 6), ("all", 7)] {
        let of_option = rows.iter().filter(|row| row[1] == option);
        for row in of_option {
            assert_eq!(row.iter().filter(|word| **word == "/").count(), numbers);
        }
    }
}

#[test]
fn gradcheck_without_options_runs_every_option() {
    let ended = gradcheck(&["--head-sizes", "16", "--dtypes", "f32"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let rows = rows(&ended);
    let options: Vec<&str> = rows.iter().map(|row| row[1]).collect();
    let expected = [
        "full",
        "causal",
        "window",
        "softcap",
        "mask",
        "bias",
        "kv-lengths",
        "query-lengths",
        "segments",
        "intervals",
        "sinks",
        "dropout",
        "gqa",
        "value-dim",
        "scale",
        "lse",
        "all",
    ];
    assert_eq!(options, expected);
}

#[test]
fn gradcheck_seed_draws_the_same_data() {
    let draw =
        |seed| gradcheck(&["--options", "full", "--head-sizes", "32", "--seed", seed]).stdout;
    assert_eq!(draw("1"), draw("1"));
    assert_ne!(draw("1"), draw("2"));
}

#[test]
fn gradcheck_wrong_arguments_are_refused() {
    for (arguments, word) in [
        (["--head-sizes", "0"], "1024"),
        (["--head-sizes", "64,1025"], "1024"),
        (["--options", "causal,windows"], "window"),
        (["--dtypes", "f64"], "bf16"),
    ] {
        let ended = gradcheck(&arguments);
        assert_eq!(ended.code, Some(2), "{ended:?}");
        assert!(ended.stderr.contains(word), "{ended:?}");
    }
}
