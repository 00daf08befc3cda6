//! Tests that wrong calls are refused. The error names the argument, its actual shape, dtype or value, and what is
//! expected instead. The panicking functions panic with the same text, and the `try_` functions never panic.

use crate::devices::{cube_devices, devices};
use crate::refused::{Call, Expected, Kind, bools, check, dtype, floats, ints, number, shape};
use attention_cube::{AttentionOptions, BlockMask, try_fused_attention};
#[cfg(feature = "ndarray")]
use attention_cube::{AttentionProblem, explain, reference};
use burn::tensor::{DType, Device, Tensor};

#[test]
fn query_of_wrong_shape_is_refused() {
    for device in devices() {
        for has in [[2, 4, 3, 0], [1, 1, 1, 1025]] {
            let query = floats(has, &device.device);
            let call = Call {
                query,
                ..Call::fitting(&device.device)
            };
            let expected = shape("query", &has, (3, "head_dim"), "from 1 to 1024");
            check(device.name, &call, &expected);
        }
    }
}

#[test]
fn key_of_wrong_shape_is_refused() {
    let divisor = "a divisor of the query's 4 heads";
    for device in devices() {
        let on = &device.device;
        for (has, dimension, want) in [
            ([3, 2, 5, 8], (0, "batch"), "2, the query's batch"),
            ([2, 2, 5, 7], (3, "head_dim"), "8, the query's head_dim"),
            ([2, 3, 5, 8], (1, "kv_heads"), divisor),
            ([2, 8, 5, 8], (1, "kv_heads"), divisor),
            ([2, 0, 5, 8], (1, "kv_heads"), divisor),
        ] {
            let value = floats([2, has[1], 5, 6], on);
            let call = Call {
                key: floats(has, on),
                value,
                ..Call::fitting(on)
            };
            check(device.name, &call, &shape("key", &has, dimension, want));
        }
    }
}

#[test]
fn value_of_wrong_shape_is_refused() {
    for device in devices() {
        let on = &device.device;
        for (has, dimension, want) in [
            ([1, 2, 5, 6], (0, "batch"), "2, the query's batch"),
            ([2, 4, 5, 6], (1, "kv_heads"), "2, the key's kv_heads"),
            ([2, 2, 4, 6], (2, "kv_len"), "5, the key's kv_len"),
            ([2, 2, 5, 0], (3, "value_dim"), "from 1 to 1024"),
            ([2, 2, 5, 1025], (3, "value_dim"), "from 1 to 1024"),
        ] {
            let call = Call {
                value: floats(has, on),
                ..Call::fitting(on)
            };
            check(device.name, &call, &shape("value", &has, dimension, want));
        }
    }
}

#[test]
fn mask_or_bias_of_wrong_shape_is_refused() {
    let scores = [2, 4, 3, 5];
    for device in devices() {
        let on = &device.device;
        for (dim, name) in ["batch", "q_heads", "q_len", "kv_len"]
            .into_iter()
            .enumerate()
        {
            let mut has = scores;
            has[dim] = 7;
            let want = format!("{} or 1, to broadcast to {scores:?}", scores[dim]);
            let mask = AttentionOptions::new().mask(bools(has, on));
            let bias = AttentionOptions::new().bias(floats(has, on));
            for (argument, options) in [("mask", mask), ("bias", bias)] {
                let call = Call::fitting(on).with_options(options);
                check(
                    device.name,
                    &call,
                    &shape(argument, &has, (dim, name), &want),
                );
            }
        }
    }
}

#[test]
fn block_mask_that_does_not_fit_is_refused() {
    for device in devices() {
        let on = &device.device;
        let new = AttentionOptions::new;
        let of = |shape, block| new().block_mask(BlockMask::new(bools(shape, on), block));
        let whole = "2 or 1, to broadcast to [2, 4, 2, 3]";
        let sizes = "should be blocks of 1 to 2^20 queries and keys";
        for (options, expected) in [
            (
                of([2, 4, 3, 3], [2, 2]),
                shape("block_mask", &[2, 4, 3, 3], (2, "query blocks"), whole),
            ),
            (
                of([2, 4, 1, 1], [0, 2]),
                Expected {
                    kind: Kind::Value,
                    argument: "block_mask",
                    texts: vec![format!("is 0, and it {sizes}")],
                },
            ),
            (
                of([2, 4, 1, 1], [2, 1 << 21]),
                Expected {
                    kind: Kind::Value,
                    argument: "block_mask",
                    texts: vec![format!("is 2097152, and it {sizes}")],
                },
            ),
            (
                of([2, 4, 2, 3], [2, 2]).mask(bools([2, 4, 3, 5], on)),
                Expected {
                    kind: Kind::Combination,
                    argument: "block_mask",
                    texts: vec!["cannot be combined with mask".into()],
                },
            ),
        ] {
            let call = Call::fitting(on).with_options(options);
            check(device.name, &call, &expected);
        }
    }
}

#[test]
fn lengths_segments_intervals_or_sinks_of_wrong_shape_are_refused() {
    const BATCH: (usize, &str) = (0, "batch");
    const LENGTH: (usize, &str) = (1, "length");
    let batch = "2, the query's batch";
    for device in devices() {
        let on = &device.device;
        let segments = |queries: [usize; 2], keys: [usize; 2]| {
            AttentionOptions::new().segments(ints(queries, on), ints(keys, on))
        };
        let intervals = |start: [usize; 2], end: [usize; 2]| {
            AttentionOptions::new().visible_between(ints(start, on), ints(end, on))
        };
        let of_start = |has, dimension, want| shape("interval start", has, dimension, want);
        let lengths = AttentionOptions::new().kv_lengths(ints([3], on));
        let query_lengths = AttentionOptions::new().query_lengths(ints([3], on));
        let sinks = AttentionOptions::new().sinks(floats([2], on));
        let heads = "4, the query's heads";
        let of_queries = |has, dimension, want| shape("query segments", has, dimension, want);
        let of_keys = |has, dimension, want| shape("key segments", has, dimension, want);
        for (options, expected) in [
            (lengths, shape("kv_lengths", &[3], BATCH, batch)),
            (query_lengths, shape("query_lengths", &[3], BATCH, batch)),
            (segments([1, 3], [2, 5]), of_queries(&[1, 3], BATCH, batch)),
            (
                segments([2, 5], [2, 5]),
                of_queries(&[2, 5], LENGTH, "3, the query's q_len"),
            ),
            (segments([2, 3], [4, 5]), of_keys(&[4, 5], BATCH, batch)),
            (
                segments([2, 3], [2, 3]),
                of_keys(&[2, 3], LENGTH, "5, the key's kv_len"),
            ),
            (intervals([1, 3], [2, 3]), of_start(&[1, 3], BATCH, batch)),
            (
                intervals([2, 3], [2, 5]),
                shape(
                    "interval end",
                    &[2, 5],
                    (1, "q_len"),
                    "3, the query's q_len",
                ),
            ),
            (sinks, shape("sinks", &[2], (0, "q_heads"), heads)),
        ] {
            check(
                device.name,
                &Call::fitting(on).with_options(options),
                &expected,
            );
        }
    }
}

#[test]
fn argument_of_wrong_dtype_is_refused() {
    for device in devices() {
        let on = &device.device;
        let half = |tensor: Tensor<4>| tensor.cast(DType::F16);
        let fit = Call::fitting(on);
        let bias = AttentionOptions::new().bias(half(floats([1; 4], on)));
        let sinks = AttentionOptions::new().sinks(floats([4], on).cast(DType::F16));
        for (argument, call) in [
            (
                "key",
                Call {
                    key: half(fit.key.clone()),
                    ..fit.clone()
                },
            ),
            (
                "value",
                Call {
                    value: half(fit.value.clone()),
                    ..fit.clone()
                },
            ),
            ("bias", fit.with_options(bias)),
            ("sinks", fit.with_options(sinks)),
        ] {
            check(device.name, &call, &dtype(argument));
        }
    }
}

#[test]
fn scale_softcap_or_dropout_out_of_range_is_refused() {
    for device in devices() {
        let fit = Call::fitting(&device.device);
        for scale in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e300] {
            let call = fit.with_options(AttentionOptions::new().scale(scale));
            check(device.name, &call, &number("scale", scale, "a finite f32"));
        }
        for softcap in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e300, 1e-300] {
            let call = fit.with_options(AttentionOptions::new().softcap(softcap));
            check(
                device.name,
                &call,
                &number("softcap", softcap, "a finite f32 above zero"),
            );
        }
        for dropout in [-0.1, 0.995, 1.0, f64::NAN, f64::INFINITY] {
            let call = fit.with_options(AttentionOptions::new().dropout(dropout, 1));
            let expected = number("dropout", dropout, "a probability from 0 to 0.99");
            check(device.name, &call, &expected);
        }
    }
}

#[test]
fn third_interval_is_refused() {
    for device in devices() {
        let on = &device.device;
        let add =
            |options: AttentionOptions| options.visible_between(ints([2, 3], on), ints([2, 3], on));
        let options = add(add(add(AttentionOptions::new())));
        check(
            device.name,
            &Call::fitting(on).with_options(options),
            &Expected {
                kind: Kind::Value,
                argument: "visible_between",
                texts: vec!["at most 2 intervals per query".into()],
            },
        );
    }
}

/// Checks that a call is refused if one of its tensors is not on the device of the query.
#[test]
fn argument_on_other_device_is_refused() {
    let flex = &Device::flex();
    for device in cube_devices() {
        let on = &device.device;
        let fit = Call::fitting(on);
        let new = AttentionOptions::new;
        let query_segments = new().segments(ints([2, 3], flex), ints([2, 5], on));
        let key_segments = new().segments(ints([2, 3], on), ints([2, 5], flex));
        for (argument, call) in [
            (
                "key",
                Call {
                    key: floats([2, 2, 5, 8], flex),
                    ..fit.clone()
                },
            ),
            (
                "value",
                Call {
                    value: floats([2, 2, 5, 6], flex),
                    ..fit.clone()
                },
            ),
            (
                "mask",
                fit.with_options(new().mask(bools([2, 4, 3, 5], flex))),
            ),
            (
                "bias",
                fit.with_options(new().bias(floats([2, 4, 3, 5], flex))),
            ),
            (
                "kv_lengths",
                fit.with_options(new().kv_lengths(ints([2], flex))),
            ),
            (
                "query_lengths",
                fit.with_options(new().query_lengths(ints([2], flex))),
            ),
            ("query segments", fit.with_options(query_segments)),
            ("key segments", fit.with_options(key_segments)),
            (
                "interval end",
                fit.with_options(new().visible_between(ints([2, 3], on), ints([2, 3], flex))),
            ),
            ("sinks", fit.with_options(new().sinks(floats([4], flex)))),
        ] {
            let has = format!("{argument} is on {flex:?}");
            let texts = vec![has, format!("the query's device, {on:?}")];
            check(
                device.name,
                &call,
                &Expected {
                    kind: Kind::Device,
                    argument,
                    texts,
                },
            );
        }
    }
}

/// Checks that a call may mix two kinds of tensors: tensors that autodiff tracks, and constants on a device without
/// autodiff.
#[test]
fn autodiff_device_beside_plain_device_is_accepted() {
    for device in devices() {
        let tracked = device.device.clone().autodiff();
        let (plain, other) = (Call::fitting(&device.device), Call::fitting(&tracked));
        let options = AttentionOptions::new().bias(floats([1; 4], &tracked));
        let mixed = [
            Call {
                key: other.key.clone(),
                ..plain.with_options(options.clone())
            },
            Call {
                query: other.query.clone(),
                ..plain.with_options(options)
            },
        ];
        for call in mixed {
            if let Err(error) = call.of(try_fused_attention) {
                panic!("{}: {error}", device.name);
            }
        }
    }
}

/// Checks that a call is refused if two of its inputs have different strategies of gradient checkpointing. Inputs without
/// autodiff have no strategy.
#[test]
fn mixed_checkpointing_strategies_are_refused() {
    for device in devices() {
        let on = &device.device.clone().autodiff();
        let other = &on.clone().gradient_checkpointing();
        let fit = Call::fitting(on);
        let checkpointed = Call::fitting(other);
        let new = AttentionOptions::new;
        let segments = |queries, keys| new().segments(ints([2, 3], queries), ints([2, 5], keys));
        for (argument, beside, call) in [
            (
                "key",
                "query",
                Call {
                    key: checkpointed.key.clone(),
                    ..fit.clone()
                },
            ),
            (
                "value",
                "key",
                Call {
                    query: floats([2, 4, 3, 8], &device.device),
                    value: checkpointed.value.clone(),
                    ..fit.clone()
                },
            ),
            (
                "mask",
                "query",
                fit.with_options(new().mask(bools([2, 4, 3, 5], other))),
            ),
            (
                "bias",
                "query",
                fit.with_options(new().bias(floats([2, 4, 3, 5], other))),
            ),
            (
                "kv_lengths",
                "query",
                fit.with_options(new().kv_lengths(ints([2], other))),
            ),
            (
                "query_lengths",
                "query",
                fit.with_options(new().query_lengths(ints([2], other))),
            ),
            (
                "query segments",
                "query",
                fit.with_options(segments(other, on)),
            ),
            (
                "key segments",
                "query",
                fit.with_options(segments(on, other)),
            ),
            (
                "interval start",
                "query",
                fit.with_options(new().visible_between(ints([2, 3], other), ints([2, 3], on))),
            ),
            (
                "sinks",
                "query",
                fit.with_options(new().sinks(floats([4], other))),
            ),
        ] {
            let texts = vec![
                format!("{argument} has gradient checkpointing Balanced"),
                format!("the {beside}'s, Disabled"),
            ];
            check(
                device.name,
                &call,
                &Expected {
                    kind: Kind::Checkpointing,
                    argument,
                    texts,
                },
            );
        }
        assert!(checkpointed.of(try_fused_attention).is_ok());
    }
}

/// Checks a call on NdArray, a backend for which the operator has no implementation. The call is refused, and the error
/// names the backend. The reference still runs on such a backend.
#[cfg(feature = "ndarray")]
#[test]
fn backend_without_kernels_is_refused_by_name() {
    #[allow(
        deprecated,
        reason = "the test needs a backend that the operator does not support"
    )]
    let device = Device::ndarray();
    for on in [device.clone(), device.clone().autodiff()] {
        let call = Call::fitting(&on);
        let error = match call.of(try_fused_attention) {
            Ok(_) => panic!("no error"),
            Err(error) => error.to_string(),
        };
        assert!(error.contains("NdArray"), "{error}");
        let Call {
            query,
            key,
            value,
            options,
        } = Call::fitting(&Device::flex());
        let problem =
            AttentionProblem::new(&query, &key, &value, &options).expect("the arguments are valid");
        let explanation = explain(&problem, &on).to_string();
        assert!(explanation.contains(&error), "{explanation}");
        assert!(call.of(reference::attention).is_ok());
    }
}
