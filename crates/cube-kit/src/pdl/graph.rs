//! Turns the dependencies of a CUDA graph under capture into programmatic dependencies (PDL), so that launches overlap.

use super::SUFFIX;
use cubecl_common::{
    device::Device,
    device_handle::{CallResultExt, DeviceHandle},
};
use cubecl_cuda::{CudaDevice, CudaRuntime};
use cubecl_environment::stream::StreamId;
use cubecl_runtime::runtime::Runtime;
use cubecl_server::stream::WriteScoped;
use libloading::Library;
use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    ptr::{null, null_mut},
    sync::OnceLock,
};

type CudaServer = <CudaRuntime as Runtime>::Server;
type Graph = *mut c_void;
type Node = *mut c_void;

/// Makes every dependency of a PDL kernel ([`pdl`](super)) on another kernel programmatic, in a CUDA graph under
/// capture. Returns the number of changed dependencies.
///
/// The graph is the one that captures the calling thread's launches on `device`. Returns 0 if no graph is being
/// captured, or if the driver is older than CUDA 12.3, which lacks programmatic dependencies.
pub fn make_edges_programmatic(device: &CudaDevice) -> usize {
    let stream = StreamId::current();
    let handle = DeviceHandle::<CudaServer>::new(device.to_id());
    let edited = handle.submit_blocking(move |server| {
        let stream = server.write_streams().try_stream_mut(&stream)?;
        let driver = Driver::loaded()?;
        // SAFETY: the stream belongs to the server, and the server's thread runs this closure in the server's CUDA
        // context. No other thread uses the stream while the closure runs.
        unsafe { driver.overlap(stream.sys.cast()) }
    });
    // If the closure has panicked, the caller must panic, too, because the graph may have lost a dependency and must
    // not be replayed.
    edited.unwrap_or_resume().unwrap_or(0)
}

/// The C struct `CUgraphEdgeData`.
#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq)]
struct Edge {
    from_port: u8,
    to_port: u8,
    kind: u8,
    reserved: [u8; 5],
}

/// A programmatic edge: the second kernel begins when every cube of the first kernel has called `launch_dependents` or
/// has ended. `from_port` is `CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC`, and `kind` is
/// `CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC`.
const OVERLAPPING: Edge = Edge {
    from_port: 1,
    to_port: 0,
    kind: 1,
    reserved: [0; 5],
};

/// The constant `CU_GRAPH_NODE_TYPE_KERNEL`.
const KERNEL: c_int = 0;

/// The constant `CU_STREAM_CAPTURE_STATUS_ACTIVE`.
const ACTIVE: c_int = 1;

/// The C struct `CUDA_KERNEL_NODE_PARAMS`. The code reads only its field `function`.
#[repr(C)]
struct KernelParameters {
    function: *mut c_void,
    sizes: [c_uint; 7],
    rest: [*mut c_void; 4],
}

/// The functions of the CUDA driver that this module calls, under their names in CUDA 12.3 and later. They are loaded
/// at run time, because CubeCL's bindings contain only the functions of the CUDA version at build time.
struct Driver {
    capture_info: unsafe extern "C" fn(
        *mut c_void,
        *mut c_int,
        *mut u64,
        *mut Graph,
        *mut *const Node,
        *mut *const Edge,
        *mut usize,
    ) -> c_int,
    edges: unsafe extern "C" fn(Graph, *mut Node, *mut Node, *mut Edge, *mut usize) -> c_int,
    remove: unsafe extern "C" fn(Graph, *const Node, *const Node, *const Edge, usize) -> c_int,
    add: unsafe extern "C" fn(Graph, *const Node, *const Node, *const Edge, usize) -> c_int,
    kind: unsafe extern "C" fn(Node, *mut c_int) -> c_int,
    parameters: unsafe extern "C" fn(Node, *mut KernelParameters) -> c_int,
    name: unsafe extern "C" fn(*mut *const c_char, *mut c_void) -> c_int,
    _library: Library,
}

impl Driver {
    fn loaded() -> Option<&'static Self> {
        static DRIVER: OnceLock<Option<Driver>> = OnceLock::new();
        DRIVER.get_or_init(Self::load).as_ref()
    }

    fn load() -> Option<Self> {
        let names = ["libcuda.so.1", "libcuda.so", "nvcuda.dll"];
        // SAFETY: the library is the CUDA driver, which the program has already loaded. The driver's functions have the
        // types that are declared here.
        unsafe {
            let library = names.iter().find_map(|name| Library::new(name).ok())?;
            macro_rules! function {
                ($name:literal) => {
                    *library.get(concat!($name, "\0").as_bytes()).ok()?
                };
            }
            Some(Self {
                capture_info: function!("cuStreamGetCaptureInfo_v3"),
                edges: function!("cuGraphGetEdges_v2"),
                remove: function!("cuGraphRemoveDependencies_v2"),
                add: function!("cuGraphAddDependencies_v2"),
                kind: function!("cuGraphNodeGetType"),
                parameters: function!("cuGraphKernelNodeGetParams_v2"),
                name: function!("cuFuncGetName"),
                _library: library,
            })
        }
    }

    /// Makes each edge from a kernel to a PDL kernel programmatic, in the graph that captures `stream`. Returns the
    /// number of changed edges.
    ///
    /// # Safety
    /// `stream` must be a stream of the current context that no other thread uses.
    unsafe fn overlap(&self, stream: *mut c_void) -> Option<usize> {
        let mut status = 0;
        let mut graph: Graph = null_mut();
        // SAFETY: `stream` is a stream of the current context. The output pointers `status` and `graph` point to local
        // variables. All other output pointers are null, which the driver allows.
        let asked = unsafe {
            (self.capture_info)(
                stream,
                &mut status,
                null_mut(),
                &mut graph,
                null_mut(),
                null_mut(),
                null_mut(),
            )
        };
        if asked != 0 || status != ACTIVE || graph.is_null() {
            return None;
        }
        let mut count = 0;
        // SAFETY: the driver writes only `count`, a local variable, because the pointers to the output arrays are null.
        let counted =
            unsafe { (self.edges)(graph, null_mut(), null_mut(), null_mut(), &mut count) };
        let (mut from, mut to) = (vec![null_mut(); count], vec![null_mut(); count]);
        let mut edges = vec![Edge::default(); count];
        // SAFETY: the driver writes at most `count` elements to each of `from`, `to` and `edges`, which have `count`
        // elements each.
        let read = unsafe {
            (self.edges)(
                graph,
                from.as_mut_ptr(),
                to.as_mut_ptr(),
                edges.as_mut_ptr(),
                &mut count,
            )
        };
        if counted != 0 || read != 0 {
            return None;
        }
        let mut overlapping = 0;
        for ((from, to), edge) in from.iter().zip(&to).zip(&edges).take(count) {
            // SAFETY: the nodes `from` and `to` belong to `graph`, which is still under capture and may be changed.
            // `edge` points to an element of `edges`.
            unsafe {
                let takes_part = *edge == Edge::default()
                    && self.function_name(*from).is_some()
                    && self
                        .function_name(*to)
                        .is_some_and(|name| name.contains(SUFFIX));
                if !takes_part || (self.remove)(graph, from, to, edge, 1) != 0 {
                    continue;
                }
                if (self.add)(graph, from, to, &OVERLAPPING, 1) == 0 {
                    overlapping += 1;
                } else {
                    let restored = (self.add)(graph, from, to, edge, 1);
                    assert_eq!(
                        restored, 0,
                        "CUDA must accept the dependency that was just removed"
                    );
                }
            }
        }
        Some(overlapping)
    }

    /// Returns the name of the kernel that a node launches, or `None` if the node launches no kernel.
    ///
    /// # Safety
    /// `node` must be a node of a graph.
    unsafe fn function_name(&self, node: Node) -> Option<String> {
        let mut kind = 0;
        let mut parameters = KernelParameters {
            function: null_mut(),
            sizes: [0; 7],
            rest: [null_mut(); 4],
        };
        let mut name = null();
        // SAFETY: `kind` is checked first, because the driver returns parameters only for kernel nodes. The function in
        // `parameters` stays loaded while the graph exists, and its `name` ends with a zero byte.
        unsafe {
            if (self.kind)(node, &mut kind) != 0
                || kind != KERNEL
                || (self.parameters)(node, &mut parameters) != 0
                || parameters.function.is_null()
                || (self.name)(&mut name, parameters.function) != 0
                || name.is_null()
            {
                return None;
            }
            CStr::from_ptr(name).to_str().ok().map(str::to_owned)
        }
    }
}
