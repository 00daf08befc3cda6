//! The dependencies of a graph that is being captured, made such that launches overlap.

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

/// Lets launches of kernels that take part ([`overlap`](super)) begin before the one before each has ended, in the graph that captures
/// the calling thread's launches on `device`; how many those are. 0 where nothing is captured, and where the driver is from
/// before CUDA 12.3, which knows no such dependencies.
pub fn overlap_launches(device: &CudaDevice) -> usize {
    let stream = StreamId::current();
    let handle = DeviceHandle::<CudaServer>::new(device.to_id());
    let edited = handle.submit_blocking(move |server| {
        let stream = server.write_streams().try_stream_mut(&stream)?;
        let driver = Driver::loaded()?;
        // SAFETY: it is a stream of the server's, whose thread this is, with its context; nobody else uses it meanwhile.
        unsafe { driver.overlap(stream.sys.cast()) }
    });
    // A graph without a dependency that it had must not be replayed.
    edited.unwrap_or_resume().unwrap_or(0)
}

/// `CUgraphEdgeData`.
#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq)]
struct Edge {
    from_port: u8,
    to_port: u8,
    kind: u8,
    reserved: [u8; 5],
}

/// The next one begins when every cube of the first has let it, or has ended: `CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC`,
/// `CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC`.
const OVERLAPPING: Edge = Edge {
    from_port: 1,
    to_port: 0,
    kind: 1,
    reserved: [0; 5],
};

/// `CU_GRAPH_NODE_TYPE_KERNEL`.
const KERNEL: c_int = 0;

/// `CU_STREAM_CAPTURE_STATUS_ACTIVE`.
const ACTIVE: c_int = 1;

/// `CUDA_KERNEL_NODE_PARAMS`, of which only the function is read.
#[repr(C)]
struct KernelParameters {
    function: *mut c_void,
    sizes: [c_uint; 7],
    rest: [*mut c_void; 4],
}

/// What of CUDA's driver is called here, by the names that it has had since 12.3. CubeCL's bindings have those of the CUDA that a program was
/// built beside.
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
        // SAFETY: it is CUDA's driver, which the program has loaded already, and its functions have these types.
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

    /// How many dependencies of the graph that captures `stream` are now overlapping ones.
    ///
    /// # Safety
    /// It is a stream of the current context that nobody else uses.
    unsafe fn overlap(&self, stream: *mut c_void) -> Option<usize> {
        let mut status = 0;
        let mut graph: Graph = null_mut();
        // SAFETY: all that is written is there, or absent.
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
        // SAFETY: without room for them, they are counted.
        let counted =
            unsafe { (self.edges)(graph, null_mut(), null_mut(), null_mut(), &mut count) };
        let (mut from, mut to) = (vec![null_mut(); count], vec![null_mut(); count]);
        let mut edges = vec![Edge::default(); count];
        // SAFETY: there is room for as many as were counted.
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
            // SAFETY: they are nodes of the graph, which is still captured and may be changed.
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
                    assert_eq!(restored, 0, "CUDA takes a dependency back that it had");
                }
            }
        }
        Some(overlapping)
    }

    /// The name of the kernel that a node launches, if that is what it does.
    ///
    /// # Safety
    /// It is a node of a graph.
    unsafe fn function_name(&self, node: Node) -> Option<String> {
        let mut kind = 0;
        let mut parameters = KernelParameters {
            function: null_mut(),
            sizes: [0; 7],
            rest: [null_mut(); 4],
        };
        let mut name = null();
        // SAFETY: only kernels are asked for theirs, whose functions are loaded while the graph is; names end with a zero.
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
