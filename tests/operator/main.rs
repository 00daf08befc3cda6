//! scratch
use attention_cube::{AttentionOptions, attention_with_lse, reference};
use burn::tensor::{Device, DeviceKind, Distribution, Tensor, DType};

fn check(device: &Device, shape: [usize; 7], options: impl Fn(&Device) -> AttentionOptions, dtype: DType) {
    let [b, hq, hk, sq, sk, d, dv] = shape;
    let flex = Device::flex();
    let mk = |s: [usize; 4]| Tensor::<4>::random(s, Distribution::Normal(0.0, 1.0), &flex).cast(dtype);
    let (q, k, v, g) = (mk([b, hq, sq, d]), mk([b, hk, sk, d]), mk([b, hk, sk, dv]), mk([b, hq, sq, dv]));
    let run = |device: &Device, dtype: DType, reference_: bool| {
        let device = device.clone().autodiff();
        let to = |t: &Tensor<4>| Tensor::<4>::from_data(t.clone().into_data(), (&device, dtype)).require_grad();
        let (q, k, v) = (to(&q), to(&k), to(&v));
        let g = Tensor::<4>::from_data(g.clone().into_data(), (&device, dtype));
        let (o, l) = if reference_ { reference::attention(q.clone(), k.clone(), v.clone(), options(&device)) } else { attention_with_lse(q.clone(), k.clone(), v.clone(), options(&device)) }.unwrap();
        let grads = (o.clone() * g).sum().backward();
        let f = |t: Tensor<4>| t.into_data().convert::<f64>().to_vec::<f64>().unwrap();
        [f(o.inner()), f(l.inner().unsqueeze()), f(q.grad(&grads).unwrap()), f(k.grad(&grads).unwrap()), f(v.grad(&grads).unwrap())]
    };
    let exact = run(&flex, DType::F64, true);
    for (name, r) in [("flex", run(&flex, dtype, false)), ("dev", run(device, dtype, false))] {
        let errs: Vec<_> = exact.iter().zip(&r).map(|(a, b)| {
            assert_eq!(a.len(), b.len());
            let n: f64 = a.iter().filter(|x| x.is_finite()).map(|x| x * x).sum();
            let e: f64 = a.iter().zip(b).map(|(x, y)| if x == y { 0.0 } else { (x - y) * (x - y) }).sum();
            format!("{:.1e}", (e / n).sqrt())
        }).collect();
        println!("{shape:?} {name} {errs:?}");
    }
}

#[test]
fn scratch() {
    let device = Device::wgpu(DeviceKind::DefaultDevice);
    for dtype in [DType::F32, DType::F16] {
        check(&device, [1, 2, 2, 64, 64, 64, 64], |_| AttentionOptions::new(), dtype);
        check(&device, [2, 4, 2, 70, 131, 48, 80], |_| AttentionOptions::new().causal(), dtype);
        check(&device, [2, 4, 2, 70, 131, 48, 80], |_| AttentionOptions::new().causal().softcap(5.0).window(Some(20), None), dtype);
        check(&device, [1, 8, 1, 1, 300, 512, 512], |_| AttentionOptions::new().causal().scale(0.1), dtype);
        check(&device, [1, 2, 1, 50, 60, 1023, 7], |_| AttentionOptions::new().causal().scale(0.1), dtype);
        check(&device, [1, 2, 1, 50, 60, 7, 1024], |_| AttentionOptions::new().causal().scale(0.1), dtype);
    }
}
