//! Tests that run small PTX kernels in the emulator.

mod asynchronous;
mod faults;
mod lanes;
mod matrix;
mod shared;

use super::{Allocation, Launch, Outcome};
use crate::fault::{Fault, LocatedFault};
use crate::ptx::Module;

/// A test kernel. Its first parameter is the address of its output, which the body finds in the register `%out`.
struct Kernel {
    /// The declarations and instructions of the kernel in PTX.
    body: String,
    threads: u32,
    cubes: u32,
    dynamic_shared: usize,
    /// The number of 32-bit words of the output.
    words: usize,
    /// The input buffers. Their addresses are the kernel's parameters `input0`, `input1`, and so on.
    inputs: Vec<Vec<u8>>,
}

impl Kernel {
    fn new(body: &str, threads: u32) -> Self {
        Self {
            body: body.to_string(),
            threads,
            cubes: 1,
            dynamic_shared: 0,
            words: threads as usize,
            inputs: Vec::new(),
        }
    }

    fn source(&self) -> String {
        let inputs: String = (0..self.inputs.len())
            .map(|k| format!(", .param .u64 input{k}"))
            .collect();
        format!(
            ".version 8.0\n.target sm_90a\n.address_size 64\n\
             .extern .shared .align 1024 .b8 dynamic[];\n\
             .visible .entry kernel(.param .u64 output{inputs})\n{{\n\
             .reg .b64 %out;\n.reg .b32 %tid;\n.reg .b64 %own;\n\
             ld.param.u64 %out, [output];\n\
             mov.u32 %tid, %tid.x;\n\
             mad.wide.u32 %own, %tid, 4, %out;\n{}\nret;\n}}",
            self.body
        )
    }

    fn run(&self) -> Result<(Vec<u32>, Outcome), LocatedFault> {
        let module = Module::parse(&self.source()).unwrap();
        let mut output = vec![0u32; self.words];
        let mut allocations = vec![Allocation {
            start: output.as_mut_ptr() as u64,
            bytes: 4 * self.words as u64,
        }];
        allocations.extend(self.inputs.iter().map(|input| Allocation {
            start: input.as_ptr() as u64,
            bytes: input.len() as u64,
        }));
        let arguments: Vec<u8> = allocations
            .iter()
            .flat_map(|allocation| allocation.start.to_le_bytes())
            .collect();
        allocations.sort_by_key(|allocation| allocation.start);
        let launch = Launch {
            function: &module.functions["kernel"],
            grid: [self.cubes, 1, 1],
            cube_size: [self.threads, 1, 1],
            dynamic_shared: self.dynamic_shared,
            arguments: &arguments,
            allocations: &allocations,
        };
        let outcome = launch.run(2)?;
        Ok((output, outcome))
    }

    /// Runs the kernel and returns its output. Panics if the kernel has data races.
    fn output(&self) -> Vec<u32> {
        let (output, outcome) = self.run().unwrap();
        assert!(outcome.races.is_empty(), "{:?}", outcome.races);
        output
    }

    fn races(&self) -> Vec<String> {
        self.run().unwrap().1.races
    }

    fn fault(&self) -> Fault {
        self.run().unwrap_err().fault
    }
}

/// Runs a kernel with `threads` threads that store one word each, and returns the words.
fn output(body: &str, threads: u32) -> Vec<u32> {
    Kernel::new(body, threads).output()
}
