//! Tests of arguments that do not fit packed sequences.

use crate::devices::devices;
use attention_cube::varlen::{Sequences, try_varlen_attention};
use attention_cube::{AttentionError, AttentionOptions};
use burn::tensor::{Device, Int, Tensor};

#[test]
fn varlen_arguments_that_do_not_fit_are_refused() {
    let on = &Device::flex();
    let ids = |bounds: &[i32]| Tensor::<1, Int>::from_ints(bounds, on);
    let call = |sequences: Sequences, options: AttentionOptions| {
        let rows = Tensor::<3>::zeros([4, 2, 8], on);
        let result = try_varlen_attention(rows.clone(), rows.clone(), rows, &sequences, options);
        result.map(|_| ()).expect_err("the arguments do not fit")
    };
    let fitting = || Sequences::of_self_attention(ids(&[0, 4]));
    let sizes = Sequences {
        cu_seqlens_q: ids(&[0, 4]),
        cu_seqlens_k: ids(&[0, 2, 4]),
    };
    let error = call(sizes, AttentionOptions::new()).to_string();
    assert!(error.starts_with("cu_seqlens_k has shape [3]"), "{error}");
    let error = call(
        Sequences::of_self_attention(ids(&[])),
        AttentionOptions::new(),
    );
    let error = error.to_string();
    assert!(error.starts_with("cu_seqlens_q has shape [0]"), "{error}");
    for device in devices() {
        let elsewhere = Tensor::<1, Int>::from_ints([0, 4], &device.device);
        if elsewhere.device() == ids(&[0, 4]).device() {
            continue;
        }
        for (argument, cu_seqlens_q) in [
            ("cu_seqlens_q", elsewhere.clone()),
            ("cu_seqlens_k", ids(&[0, 4])),
        ] {
            let sequences = Sequences {
                cu_seqlens_q,
                cu_seqlens_k: elsewhere.clone(),
            };
            let error = call(sequences, AttentionOptions::new()).to_string();
            assert!(error.starts_with(&format!("{argument} is on")), "{error}");
        }
    }
    let row = || Tensor::<2, Int>::zeros([1, 4], on);
    for (argument, options) in [
        ("kv_lengths", AttentionOptions::new().kv_lengths(ids(&[4]))),
        (
            "query_lengths",
            AttentionOptions::new().query_lengths(ids(&[4])),
        ),
        (
            "visible_between",
            AttentionOptions::new().visible_between(row(), row()),
        ),
    ] {
        assert_eq!(
            call(fitting(), options),
            AttentionError::Combination {
                argument,
                with: "packed sequences"
            }
        );
    }
}
