//! Tests of keys and values in pages. Attention over shuffled pages must give the same bits as attention over contiguous
//! keys and values, if the same kernel runs.

use crate::case::{Case, FULL};
use crate::cliffs::hopper;
use crate::dense::{Dense, Layout, host, read};
use crate::devices::{TestDevice, devices};
use crate::inputs::Inputs;
use crate::properties::{number, sizes};
use crate::random::{bundle, numbered};
use attention_cube::CausalAlignment::{BottomRight, TopLeft};
use attention_cube::internals::device::{DeviceProfile, Feature};
use attention_cube::internals::select::{Layouts, Pass, select};
use attention_cube::paged::{
    Places, append, append_quantized, try_paged_attention, try_paged_quantized_attention,
};
use attention_cube::quantized::{QuantizedRows, try_quantized_attention};
use attention_cube::{
    AttentionError, AttentionOptions, AttentionProblem, attention_with_lse, explain,
};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use proptest::strategy::ValueTree;
use proptest::test_runner::Config;
use rand::{Rng, SeedableRng, rngs::StdRng, seq::SliceRandom};

/// The number of pages that no sequence uses.
const UNUSED_PAGES: usize = 3;

/// The keys and values of a case in pages, and the page table.
struct Pages {
    key: Dense,
    value: Dense,
    /// The page table: the page numbers of the first sequence, then those of the second sequence, and so on.
    table: Vec<i64>,
    of_sequence: usize,
}

/// Distributes keys and values to shuffled pages of `page_len` keys. Keys that no query sees become NaN, and so do all
/// unused pages. If no query sees any key of a page, the page's entry in the page table becomes a random number.
fn pages(case: &Case, inputs: &Inputs, page_len: usize) -> Pages {
    let mut rng = StdRng::seed_from_u64(page_len as u64);
    let of_sequence = case.kv_len / page_len;
    assert_eq!(of_sequence * page_len, case.kv_len, "pages are filled");
    let count = case.batch * of_sequence + UNUSED_PAGES;
    let mut order: Vec<usize> = (0..count).collect();
    order.shuffle(&mut rng);
    let mut table: Vec<i64> = order[UNUSED_PAGES..]
        .iter()
        .map(|page| *page as i64)
        .collect();
    let unused = case.unused(inputs);
    let is_unseen =
        |b: usize, h: usize, j: usize| unused.keys[(b * case.kv_heads + h) * case.kv_len + j];
    let shuffled = |rows: &Dense| {
        let [_, heads, _, columns] = rows.shape;
        let mut pages = Dense::from_fn([count, heads, page_len, columns], |_| f64::NAN);
        for (entry, page) in table.iter().enumerate() {
            let (b, number) = (entry / of_sequence, entry % of_sequence);
            for h in 0..heads {
                for slot in 0..page_len {
                    let j = number * page_len + slot;
                    if is_unseen(b, h, j) {
                        continue;
                    }
                    let to = ((*page as usize * heads + h) * page_len + slot) * columns;
                    let from = ((b * heads + h) * case.kv_len + j) * columns;
                    pages.values[to..to + columns]
                        .copy_from_slice(&rows.values[from..from + columns]);
                }
            }
        }
        pages
    };
    let (key, value) = (shuffled(&inputs.key), shuffled(&inputs.value));
    for (entry, page) in table.iter_mut().enumerate() {
        let (b, first) = (entry / of_sequence, entry % of_sequence * page_len);
        let mut keys =
            (0..case.kv_heads).flat_map(|h| (first..first + page_len).map(move |j| (h, j)));
        if keys.all(|(h, j)| is_unseen(b, h, j)) {
            *page = rng.random_range(-5..2 * count as i64);
        }
    }
    Pages {
        key,
        value,
        table,
        of_sequence,
    }
}

fn table_of(pages: &Pages, device: &Device) -> Tensor<2, Int> {
    let rows = pages.table.len() / pages.of_sequence;
    let data = TensorData::new(pages.table.clone(), [rows, pages.of_sequence]);
    Tensor::from_data(data, device)
}

fn values(results: (Tensor<4>, Tensor<3>)) -> Vec<f64> {
    let (output, lse) = results;
    [host(output.into_data()), host(lse.into_data())].concat()
}

/// Checks that results over pages equal results over contiguous keys. If both run the same kernel, their bits must be
/// equal.
///
/// If a page size makes a device choose another kernel, the results may differ by some roundings of the dtype.
#[track_caller]
fn check_equal(
    found: &[f64],
    expected: &[f64],
    has_same_kernel: bool,
    dtype: DType,
    context: &str,
) {
    let slack = match (has_same_kernel, dtype) {
        (true, _) => 0.0,
        (false, DType::BF16) => 1.0 / 64.0,
        (false, _) => 1.0 / 512.0,
    };
    let largest = expected.iter().filter(|x| x.is_finite());
    let largest = largest.fold(0.0f64, |largest, x| largest.max(x.abs()));
    assert_eq!(found.len(), expected.len(), "{context}");
    for (found, expected) in found.iter().zip(expected) {
        let is_equal = found.to_bits() == expected.to_bits();
        let is_near = (found - expected).abs() <= slack * largest;
        assert!(is_equal || is_near, "{context}: {found} and {expected}");
    }
}

/// Returns true if attention over the pages runs the same kernel as attention over contiguous keys.
fn has_same_kernel(paged: AttentionProblem, device: &Device) -> bool {
    let kernel = |problem: &AttentionProblem| explain(problem, device).forward;
    let contiguous = AttentionProblem {
        page_len: None,
        ..paged.clone()
    };
    let of_pages = kernel(&paged);
    of_pages.copies_pages || of_pages.kernel == kernel(&contiguous).kernel
}

/// Checks that pages of each size give the same bits as contiguous keys and values.
#[track_caller]
fn check(case: Case, page_lens: &[usize]) {
    let inputs = case.inputs();
    for TestDevice { name, device } in devices()
        .iter()
        .filter(|device| device.supports(case.dtype))
    {
        let tensor = |dense: &Dense, layout: Layout| {
            let stored = layout.store(dense).tensor(device, case.dtype);
            layout.view(stored, dense.shape)
        };
        let options = || {
            let extras = inputs.extras(&device.clone().autodiff(), case.extras_dtype());
            case.options(extras.without_autodiff())
        };
        let query = tensor(&inputs.query, case.layouts[0]);
        // The function `pages` also makes the contiguous keys, as one page per sequence. Therefore, the contiguous keys
        // are NaN at the same positions as the keys in the tested pages.
        let clean = pages(&case, &inputs, case.kv_len);
        let in_order = |pages: &Dense| {
            let order = Tensor::<1, Int>::from_data(
                TensorData::new(clean.table.clone(), [case.batch]),
                device,
            );
            pages
                .tensor(device, case.dtype)
                .select(0, order.clamp(0, case.batch as i64 + 2))
        };
        let contiguous = attention_with_lse(
            query.clone(),
            in_order(&clean.key),
            in_order(&clean.value),
            options(),
        );
        let expected = values(contiguous.expect("the arguments fit"));
        for page_len in page_lens {
            let pages = pages(&case, &inputs, *page_len);
            let (key, value) = (
                tensor(&pages.key, case.layouts[1]),
                tensor(&pages.value, case.layouts[2]),
            );
            let table = table_of(&pages, device);
            let problem = AttentionProblem::paged(&query, &key, &value, &table, &options())
                .expect("the arguments fit");
            let found = try_paged_attention(query.clone(), key, value, table, options());
            let found = values(found.expect("the arguments fit"));
            let context = format!("{name} {page_len}: {case:?}");
            let same = has_same_kernel(problem, device);
            check_equal(&found, &expected, same, case.dtype, &context);
        }
    }
}

/// Checks random problems in pages of a random size. Like the test of all random problems, this test draws more kinds of
/// problems with `ATTENTION_TEST_SIZES=every`, and `PROPTEST_CASES` sets their number.
#[test]
fn paged_random_problems_have_the_bits_of_contiguous_keys() {
    let sizes = sizes();
    for problem in 0..number("PROPTEST_CASES").unwrap_or(4) {
        let drawn = numbered(sizes, problem * bundle(sizes), Config::default()).1;
        let mut case = drawn.current().case;
        // `check` stores all heads and sequences of keys and values.
        for layout in &mut case.layouts[1..3] {
            if matches!(layout, Layout::SharedBatch | Layout::SharedHeads) {
                *layout = Layout::Contiguous;
            }
        }
        let mut rng = StdRng::seed_from_u64(problem);
        let mut divides: Vec<usize> = (1..=case.kv_len)
            .filter(|page_len| case.kv_len.is_multiple_of(*page_len))
            .collect();
        divides.shuffle(&mut rng);
        // Kernels read pages of whole blocks in place, and copy other pages.
        let blocks = divides.iter().find(|page_len| page_len.is_multiple_of(16));
        let sizes: Vec<usize> = blocks.into_iter().chain(divides.first()).copied().collect();
        println!("problem {problem}: pages of {sizes:?} keys, {case:?}");
        check(case, &sizes);
    }
}

fn plain(q_len: usize, kv_len: usize, width: usize) -> Case {
    Case {
        causal: Some(BottomRight),
        kv_lengths: Some(vec![kv_len as i64, 70, 0]),
        ..Case::new([3, 4, 2, q_len, kv_len, width, width])
    }
}

#[test]
fn paged_decode_has_the_bits_of_contiguous_keys() {
    for width in [32, 5] {
        for q_len in [1, 3] {
            check(plain(q_len, 640, width), &[64, 16, 128, 1, 10]);
        }
    }
    for dtype in [DType::F16, DType::BF16] {
        check(
            Case {
                dtype,
                ..plain(2, 640, 64)
            },
            &[64, 16, 160],
        );
    }
}

#[test]
fn paged_prompt_has_the_bits_of_contiguous_keys() {
    for q_len in [40, 100] {
        check(plain(q_len, 192, 32), &[64, 16, 6]);
    }
    check(
        Case {
            query_lengths: Some(vec![100, 1, 30]),
            kv_lengths: Some(vec![150, 192, 30]),
            ..plain(100, 192, 32)
        },
        &[64, 16],
    );
}

/// Checks prompts in bf16, for which a Hopper GPU copies pages by TMA. The head sizes select all tiles of the kernels,
/// and the pages are smaller than, as large as and larger than a block of keys.
#[test]
fn paged_prompts_in_bf16_have_the_bits_of_contiguous_keys() {
    for width in [40, 64, 128, 192, 256, 320, 512] {
        let case = Case {
            dtype: DType::BF16,
            ..plain(130, 384, width)
        };
        check(case, &[64, 16, 48, 192, 384, 8]);
    }
    let ids = |length: usize| (0..3 * length).map(move |token| (token % length / 50) as i64);
    for width in [128, 256, 512] {
        let case = Case {
            dtype: DType::BF16,
            ..plain(70, 384, width)
        };
        for case in [
            Case {
                window: (Some(60), Some(0)),
                dropout: Some((0.2, 7)),
                ..case.clone()
            },
            Case {
                causal: None,
                kv_lengths: None,
                mask: Some(FULL),
                ..case.clone()
            },
            Case {
                segments: Some((ids(70).collect(), ids(384).collect())),
                ..case.clone()
            },
            Case {
                query_lengths: Some(vec![70, 1, 20]),
                kv_lengths: Some(vec![384, 33, 200]),
                ..case.clone()
            },
            // Few rows over many keys, so that the keys are split.
            Case {
                kv_len: 3072,
                kv_lengths: Some(vec![3000, 900, 40]),
                q_len: 20,
                ..case.clone()
            },
        ] {
            check(case, &[64, 16]);
        }
    }
}

#[test]
fn paged_options_have_the_bits_of_contiguous_keys() {
    let ids = |length: usize| (0..3 * length).map(move |token| (token % length / 50) as i64);
    let interval = (0..3 * 5).map(|i: i64| (i % 3, 100 + 20 * (i % 5))).unzip();
    let case = plain(5, 192, 32);
    for case in [
        Case {
            window: (Some(30), Some(0)),
            ..case.clone()
        },
        Case {
            causal: Some(TopLeft),
            sinks: true,
            softcap: Some(2.0),
            ..case.clone()
        },
        Case {
            causal: None,
            kv_lengths: None,
            mask: Some(FULL),
            bias: Some(FULL),
            ..case.clone()
        },
        Case {
            segments: Some((ids(5).collect(), ids(192).collect())),
            ..case.clone()
        },
        Case {
            causal: None,
            intervals: vec![interval],
            ..case.clone()
        },
    ] {
        check(case, &[64, 16]);
    }
}

#[test]
fn paged_layouts_have_the_bits_of_contiguous_keys() {
    let sliced = Layout::Sliced {
        before: 4,
        after: 8,
    };
    for layout in [Layout::HeadsLast, Layout::Transposed, sliced] {
        check(
            Case {
                layouts: [layout; 4],
                ..plain(2, 192, 32)
            },
            &[64, 48],
        );
    }
}

/// Checks that attention over int8 pages gives the same bits as attention over contiguous int8 rows.
#[test]
fn paged_int8_has_the_bits_of_contiguous_rows() {
    for (q_len, width, page_lens) in [(1, 32, [64, 16]), (4, 64, [64, 5]), (40, 32, [64, 16])] {
        let case = plain(q_len, 320, width);
        let inputs = case.inputs();
        for TestDevice { name, device } in devices() {
            let device = &device;
            let tensor = |dense: &Dense| dense.tensor(device, case.dtype);
            let options = || case.options(inputs.extras(device, case.dtype));
            let [key, value] =
                [&inputs.key, &inputs.value].map(|rows| QuantizedRows::new(tensor(rows)));
            let expected = try_quantized_attention(tensor(&inputs.query), key, value, options());
            let expected = values(expected.expect("the arguments fit"));
            for page_len in page_lens {
                let pages = pages(&case, &inputs, page_len);
                let (query, table) = (tensor(&inputs.query), table_of(&pages, device));
                let [key, value] =
                    [&pages.key, &pages.value].map(|rows| QuantizedRows::new(tensor(rows)));
                let problem =
                    AttentionProblem::paged_quantized(&query, &key, &value, &table, &options())
                        .expect("the arguments fit");
                let found = try_paged_quantized_attention(query, key, value, table, options());
                let found = values(found.expect("the arguments fit"));
                let context = format!("{name} {page_len}: {case:?}");
                let same = has_same_kernel(problem, device);
                check_equal(&found, &expected, same, case.dtype, &context);
            }
        }
    }
}

/// Checks that attention over pages gives the same gradients as attention over contiguous keys. The compared gradients
/// are those of the query and of the keys.
#[test]
fn paged_gradients_equal_those_of_contiguous_keys() {
    let case = Case {
        kv_lengths: Some(vec![96, 40]),
        ..Case::new([2, 2, 1, 4, 96, 16, 16])
    };
    let inputs = case.inputs();
    for TestDevice { name, device } in devices() {
        let device = device.autodiff();
        let leaf = |dense: &Dense| dense.tensor(&device, case.dtype).require_grad();
        let options = || case.options(inputs.extras(&device, case.dtype));
        let (query, key) = (leaf(&inputs.query), leaf(&inputs.key));
        let value = inputs.value.tensor(&device, case.dtype);
        let (output, _) = attention_with_lse(query.clone(), key.clone(), value, options())
            .expect("the arguments fit");
        let gradients = output.sum().backward();
        let expected = query.grad(&gradients).expect("the query has a gradient");
        let of_keys = key.grad(&gradients).expect("the keys have a gradient");

        let pages = pages(&case, &inputs, 32);
        let finite = |dense: &Dense| Dense {
            values: (dense.values.iter())
                .map(|x| if x.is_nan() { 0.0 } else { *x })
                .collect(),
            ..dense.clone()
        };
        let (query, key) = (leaf(&inputs.query), leaf(&finite(&pages.key)));
        let value = finite(&pages.value).tensor(&device, case.dtype);
        let table = table_of(&pages, &device);
        let (output, _) = try_paged_attention(query.clone(), key.clone(), value, table, options())
            .expect("the arguments fit");
        let gradients = output.sum().backward();
        let found = query.grad(&gradients).expect("the query has a gradient");
        let in_pages = key.grad(&gradients).expect("the pages have a gradient");
        assert_eq!(found.into_data(), expected.into_data(), "{name}");
        let ([_, _, page_len, columns], kv_len) = (in_pages.dims(), case.kv_len);
        let (in_pages, of_keys) = (read(in_pages), read(of_keys));
        for (b, length) in [96, 40].into_iter().enumerate() {
            for j in 0..length {
                let page = pages.table[b * pages.of_sequence + j / page_len] as usize;
                let found = (page * page_len + j % page_len) * columns;
                let expected = (b * kv_len + j) * columns;
                assert_eq!(
                    in_pages[found..][..columns],
                    of_keys[expected..][..columns],
                    "{name}: key {j} of sequence {b}"
                );
            }
        }
    }
}

#[test]
fn paged_gradients_without_pages_are_zero() {
    for TestDevice { name, device } in devices() {
        let on = &device.autodiff();
        let ones = |shape| Tensor::<4>::ones(shape, on).require_grad();
        let (query, key, value) = (ones([1, 2, 3, 8]), ones([5, 1, 4, 8]), ones([5, 1, 4, 8]));
        let table = Tensor::<2, Int>::zeros([1, 0], on);
        let options = AttentionOptions::new();
        let (output, _) =
            try_paged_attention(query.clone(), key.clone(), value.clone(), table, options)
                .expect("the arguments fit");
        let gradients = output.sum().backward();
        for leaf in [query, key, value] {
            let gradient = leaf.grad(&gradients).expect("the leaf has a gradient");
            assert_eq!(gradient.dims(), leaf.dims(), "{name}");
            assert!(read(gradient).iter().all(|x| *x == 0.0), "{name}");
        }
    }
}

/// A test case of `append`: the new rows, the pages before the call, and the pages that the call must return.
struct Appended {
    places: Places,
    rows: Dense,
    before: Dense,
    after: Dense,
}

/// Draws random pages, new rows, and the positions at which `append` must write the rows. `append` must not write rows
/// past their sequence's count or past the last page.
fn appended(case: [usize; 4], ragged: bool, device: &Device) -> Appended {
    let [heads, page_len, new, columns] = case;
    let (batch, of_sequence, count) = (3, 4, 15);
    let mut rng = StdRng::seed_from_u64((page_len * new + columns) as u64);
    let mut order: Vec<i64> = (0..count).collect();
    order.shuffle(&mut rng);
    // Two entries of the page table refer to no page. Rows at the positions of these entries are therefore not written.
    (order[0], order[batch * of_sequence - 1]) = (-1, count);
    let table = &order[..batch * of_sequence];
    let before = Dense::normal(
        [count as usize, heads, page_len, columns],
        DType::F32,
        &mut rng,
    );
    let rows = Dense::normal([batch, heads, new, columns], DType::F32, &mut rng);
    let starts = [-3, page_len as i64 + 1, (of_sequence * page_len) as i64 - 2];
    let counts = [new as i64 - 1, 0, i64::from(i32::MAX)];
    let mut after = before.clone();
    for b in 0..batch {
        for i in 0..new {
            let position = starts[b].max(0) as usize + i;
            if position >= of_sequence * page_len || ragged && i as i64 >= counts[b] {
                continue;
            }
            let page = table[b * of_sequence + position / page_len];
            if !(0..count).contains(&page) {
                continue;
            }
            let page = page as usize;
            for h in 0..heads {
                let to = ((page * heads + h) * page_len + position % page_len) * columns;
                let from = ((b * heads + h) * new + i) * columns;
                after.values[to..to + columns].copy_from_slice(&rows.values[from..from + columns]);
            }
        }
    }
    let list = |integers: &[i64]| {
        let data = TensorData::new(integers.to_vec(), [integers.len()]);
        Tensor::<1, Int>::from_data(data, device)
    };
    let places = Places {
        page_table: list(table).reshape([batch, of_sequence]),
        starts: list(&starts),
        counts: ragged.then(|| list(&counts)),
    };
    Appended {
        places,
        rows,
        before,
        after,
    }
}

#[test]
fn append_writes_only_the_places_of_new_rows() {
    for TestDevice { name, device } in devices() {
        for case in [[2, 8, 5, 16], [1, 1, 3, 7], [3, 16, 1, 4], [2, 4, 30, 3]] {
            for ragged in [false, true] {
                let drawn = appended(case, ragged, &device);
                let pages = drawn.before.tensor(&device, DType::F32);
                let kept = pages.clone();
                let rows = drawn.rows.tensor(&device, DType::F32);
                let found = append(pages, rows, drawn.places).expect("the arguments fit");
                let context = format!("{name} {case:?} {ragged}");
                assert_eq!(host(found.into_data()), drawn.after.values, "{context}");
                assert_eq!(host(kept.into_data()), drawn.before.values, "{context}");
            }
        }
    }
}

/// Checks page pools in burn-lm's layout, `[blocks, block_len, kv_heads, columns]`, in which tokens come before heads.
/// Several calls of `append` write the pools. Attention then reads the pools through burn-lm's gather index and
/// lengths.
#[test]
fn paged_pools_in_token_order_equal_contiguous_keys() {
    let (lanes, block_len, heads, columns) = (2, 8, 2, 16);
    for TestDevice { name, device } in devices() {
        let mut rng = StdRng::seed_from_u64(5);
        let mut random =
            |shape| Dense::normal(shape, DType::F32, &mut rng).tensor(&device, DType::F32);
        let list = |integers: &[i32]| Tensor::<1, Int>::from_ints(integers, &device);
        // The gather index pads short lanes (sequences) with block 0, which no lane uses.
        let gather_idx = list(&[3, 1, 5, 2, 0, 0]);
        let table = gather_idx.reshape([lanes, 3]);
        let lengths = [19, 7];
        let rows = [
            random([lanes, heads, 19, columns]),
            random([lanes, heads, 19, columns]),
        ];
        let mut pools = [0, 1].map(|_| Tensor::<4>::zeros([6, block_len, heads, columns], &device));
        for (first, new) in [(0, 7), (7, 12)] {
            for (pool, rows) in pools.iter_mut().zip(&rows) {
                let places = Places {
                    page_table: table.clone(),
                    starts: list(&[first as i32; 2]),
                    counts: Some(list(&lengths.map(|length| length - first as i32))),
                };
                let rows = rows.clone().narrow(2, first, new);
                let pages = pool.clone().swap_dims(1, 2);
                *pool = append(pages, rows, places)
                    .expect("the arguments fit")
                    .swap_dims(1, 2);
            }
        }
        let query = random([lanes, 4, 1, columns]);
        let options = || AttentionOptions::new().causal().kv_lengths(list(&lengths));
        let [key, value] = pools.map(|pool| pool.swap_dims(1, 2));
        let found = try_paged_attention(query.clone(), key, value, table, options());
        let found = values(found.expect("the arguments fit"));
        let [key, value] = rows.map(|rows| {
            let rest = Tensor::<4>::zeros([lanes, heads, 5, columns], &device);
            Tensor::cat(vec![rows, rest], 2)
        });
        let expected = attention_with_lse(query, key, value, options());
        let expected = values(expected.expect("the arguments fit"));
        for (found, expected) in found.iter().zip(&expected) {
            assert!(
                (found - expected).abs() < 1e-5,
                "{name}: {found} {expected}"
            );
        }
    }
}

/// Checks shapes for which `append` has nothing to write.
#[test]
fn append_without_places_returns_the_pages() {
    for TestDevice { device, .. } in devices() {
        for (pages, new, entries) in [
            ([5, 2, 16, 8], 1, 0),
            ([5, 2, 0, 8], 1, 3),
            ([5, 2, 16, 8], 0, 3),
        ] {
            let places = Places {
                page_table: Tensor::zeros([1, entries], &device),
                starts: Tensor::zeros([1], &device),
                counts: None,
            };
            let rows = Tensor::<4>::zeros([1, 2, new, 8], &device);
            let before = Tensor::<4>::ones(pages, &device);
            let after = append(before.clone(), rows, places).expect("the arguments fit");
            assert_eq!(after.into_data(), before.into_data());
        }
    }
}

#[test]
fn append_quantized_equals_quantized_pages() {
    for TestDevice { name, device } in devices() {
        let drawn = appended([2, 8, 5, 16], true, &device);
        let tensor = |dense: &Dense| dense.tensor(&device, DType::F32);
        let pages = QuantizedRows::new(tensor(&drawn.before));
        let found = append_quantized(pages, tensor(&drawn.rows), drawn.places);
        let (words, scales) = found.expect("the arguments fit").into_parts();
        let (expected, factors) = QuantizedRows::new(tensor(&drawn.after)).into_parts();
        assert_eq!(words.into_data(), expected.into_data(), "{name}");
        assert_eq!(scales.into_data(), factors.into_data(), "{name}");
    }
}

#[test]
fn paged_arguments_that_do_not_fit_are_refused() {
    for TestDevice { device, .. } in devices() {
        let floats = |shape: [usize; 4]| Tensor::<4>::zeros(shape, &device);
        let table = |shape: [usize; 2]| Tensor::<2, Int>::zeros(shape, &device);
        let call = |key: [usize; 4], value: [usize; 4], entries: [usize; 2]| {
            try_paged_attention(
                floats([2, 4, 1, 8]),
                floats(key),
                floats(value),
                table(entries),
                AttentionOptions::new(),
            )
            .expect_err("the arguments do not fit")
        };
        let pages = [5, 2, 16, 8];
        for (key, value, entries, words) in [
            (
                pages,
                pages,
                [3, 4],
                "page_table has shape [3, 4]: its batch is 3",
            ),
            ([5, 2, 16, 9], pages, [2, 4], "key has shape [5, 2, 16, 9]"),
            (
                pages,
                [6, 2, 16, 8],
                [2, 4],
                "value has shape [6, 2, 16, 8]: its number of pages is 6",
            ),
            (pages, [5, 2, 8, 8], [2, 4], "value has shape [5, 2, 8, 8]"),
            ([0, 2, 16, 8], [0, 2, 16, 8], [2, 4], "number of pages"),
            ([5, 2, 0, 8], [5, 2, 0, 8], [2, 4], "page_len"),
            ([5, 3, 16, 8], [5, 3, 16, 8], [2, 4], "kv_heads"),
        ] {
            let error = call(key, value, entries).to_string();
            assert!(error.contains(words), "{error}: expected {words}");
        }
        let places = |batch: usize| Places {
            page_table: table([2, 4]),
            starts: Tensor::zeros([batch], &device),
            counts: None,
        };
        let error = |pages: [usize; 4], rows: [usize; 4], batch: usize| -> AttentionError {
            append(floats(pages), floats(rows), places(batch))
                .expect_err("the arguments do not fit")
        };
        for (rows, batch, words) in [
            ([2, 2, 3, 9], 2, "columns"),
            ([2, 1, 3, 8], 2, "kv_heads"),
            ([3, 2, 3, 8], 3, "page_table"),
            ([2, 2, 3, 8], 3, "starts"),
        ] {
            let error = error(pages, rows, batch).to_string();
            assert!(error.contains(words), "{error}: expected {words}");
        }
    }
}

/// Checks for which problems a kernel of a Hopper GPU reads the pages in place, and for which it needs a contiguous
/// copy.
#[test]
fn paged_selection_tells_which_problems_copy() {
    let device = Device::flex();
    let of_mma = [
        Feature::Mma(DType::BF16),
        Feature::LoadMatrix(DType::BF16),
        Feature::CopyAsync,
    ];
    let card = DeviceProfile {
        features: [hopper().features, of_mma.to_vec()].concat(),
        ..hopper()
    };
    let copies = |[q_len, width]: [usize; 2], page_len: usize| {
        let zeros = |shape: [usize; 4]| Tensor::<4>::zeros(shape, (&device, DType::BF16));
        let pages = zeros([3, 1, page_len, width]);
        let table = Tensor::<2, Int>::zeros([2, 100], &device);
        let query = zeros([2, 8, q_len, width]);
        let options = AttentionOptions::new().causal();
        let problem = AttentionProblem::paged(&query, &pages, &pages, &table, &options)
            .expect("the arguments fit");
        let layouts = Layouts::contiguous(&problem);
        let selection = select(&problem, Some(&card), layouts, Pass::Forward);
        selection.copies_pages
    };
    for width in [64, 128, 256, 512] {
        for page_len in [16, 48, 64, 128] {
            assert!(!copies([1, width], page_len), "{width} {page_len}");
        }
        assert!(copies([1, width], 10), "{width}");
        for page_len in [16, 48, 64, 128] {
            assert!(!copies([512, width], page_len), "{width} {page_len}");
        }
        assert!(copies([512, width], 20), "{width}");
    }
    // Four queries of eight heads have 32 rows. The decode kernel has tiles of 32 rows only for head sizes up to 256. For the
    // head size 512, the kernel of prompts reads the pages.
    assert!(!copies([4, 256], 16));
    assert!(!copies([4, 512], 16));
}
