//! A wrapper of NVRTC, NVIDIA's runtime compiler. The wrapper lets the real compiler emit PTX instead of machine code,
//! and caches the PTX on disk.
#![allow(non_snake_case)]

use std::ffi::{CStr, CString, OsString, c_char, c_int, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;
use std::sync::OnceLock;

type Status = c_int;

const SUCCESS: Status = 0;
const INVALID_PROGRAM: Status = 4;
/// NVRTC's status code for an internal error.
const INTERNAL_ERROR: Status = 11;

/// The default file name of the real NVRTC library. The environment variable `EMULATOR_NVRTC` overrides it.
const LIBRARY: &str = "libnvrtc.so.13";

/// A program that the caller created: its source, its PTX and its compilation log. Each of these texts ends with a
/// zero, and the size of a text includes this zero.
struct Program {
    source: CString,
    ptx: Vec<u8>,
    log: Vec<u8>,
}

unsafe extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// The value of the flag `RTLD_NOW` of `dlopen`, which resolves all symbols at once.
const NOW: c_int = 2;

type GetVersion = unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status;
type CreateProgram = unsafe extern "C" fn(
    *mut *mut c_void,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> Status;
type CompileProgram = unsafe extern "C" fn(*mut c_void, c_int, *const *const c_char) -> Status;
type GetSize = unsafe extern "C" fn(*mut c_void, *mut usize) -> Status;
type GetText = unsafe extern "C" fn(*mut c_void, *mut u8) -> Status;
type DestroyProgram = unsafe extern "C" fn(*mut *mut c_void) -> Status;

/// The functions of the real NVRTC library.
struct Compiler {
    version: GetVersion,
    create: CreateProgram,
    compile: CompileProgram,
    log_size: GetSize,
    log: GetText,
    ptx_size: GetSize,
    ptx: GetText,
    destroy: DestroyProgram,
}

impl Compiler {
    /// Returns the real compiler, which is loaded once per process, or `None` if it is not installed.
    fn get() -> Option<&'static Self> {
        static COMPILER: OnceLock<Option<Compiler>> = OnceLock::new();
        COMPILER
            .get_or_init(|| {
                let name = std::env::var("EMULATOR_NVRTC").unwrap_or(LIBRARY.into());
                let compiler = Self::open(&name);
                if compiler.is_none() {
                    eprintln!("emulator: no NVRTC at {name}; set EMULATOR_NVRTC to its path");
                }
                compiler
            })
            .as_ref()
    }

    fn open(name: &str) -> Option<Self> {
        let name = CString::new(name).ok()?;
        // SAFETY: the name ends with a zero, and loading NVIDIA's library runs only NVIDIA's constructors.
        let library = unsafe { dlopen(name.as_ptr(), NOW) };
        if library.is_null() {
            return None;
        }
        // SAFETY: each symbol is NVRTC's function, with the type in NVRTC's header.
        unsafe {
            Some(Self {
                version: symbol(library, c"nvrtcVersion")?,
                create: symbol(library, c"nvrtcCreateProgram")?,
                compile: symbol(library, c"nvrtcCompileProgram")?,
                log_size: symbol(library, c"nvrtcGetProgramLogSize")?,
                log: symbol(library, c"nvrtcGetProgramLog")?,
                ptx_size: symbol(library, c"nvrtcGetPTXSize")?,
                ptx: symbol(library, c"nvrtcGetPTX")?,
                destroy: symbol(library, c"nvrtcDestroyProgram")?,
            })
        }
    }

    /// Compiles a program with the real compiler, and stores the PTX and the log in the program.
    fn compile(&self, program: &mut Program, options: &[CString]) -> Status {
        let mut real = std::ptr::null_mut();
        let none = std::ptr::null();
        // SAFETY: the source ends with a zero, and the number of headers is 0.
        let created = unsafe {
            (self.create)(
                &mut real,
                program.source.as_ptr(),
                none,
                0,
                none.cast(),
                none.cast(),
            )
        };
        if created != SUCCESS {
            return created;
        }
        let options: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the real program exists until it is destroyed below, and `options` has the length that is passed.
        unsafe {
            let compiled = (self.compile)(real, options.len() as c_int, options.as_ptr());
            program.log = text(real, self.log_size, self.log);
            if compiled == SUCCESS {
                program.ptx = text(real, self.ptx_size, self.ptx);
            }
            (self.destroy)(&mut real);
            compiled
        }
    }
}

/// Looks up a function in a library. Returns `None` if the library lacks it.
///
/// # Safety
/// The symbol is a function of the type `T`.
unsafe fn symbol<T: Copy>(library: *mut c_void, name: &CStr) -> Option<T> {
    // SAFETY: the library is open, and the name ends with a zero.
    let found = unsafe { dlsym(library, name.as_ptr()) };
    // SAFETY: the caller guarantees that the symbol is a function of type `T`. Function pointers and data pointers have
    // the same size.
    (!found.is_null()).then(|| unsafe { std::mem::transmute_copy(&found) })
}

/// Reads a text of a program of the real NVRTC, such as the PTX. `size` returns the text's size, and `get` copies the
/// text.
///
/// # Safety
/// The program exists.
unsafe fn text(program: *mut c_void, size: GetSize, get: GetText) -> Vec<u8> {
    let mut bytes = 0;
    // SAFETY: the caller guarantees that the program exists, and the buffer has the size that `size` returns.
    unsafe {
        size(program, &mut bytes);
        let mut text = vec![0; bytes.max(1)];
        get(program, text.as_mut_ptr());
        text
    }
}

/// Returns the version of the real compiler. If the compiler is not installed, the function returns 13.0, the version
/// for which CubeCL is built.
pub fn version() -> (c_int, c_int) {
    let (mut major, mut minor) = (13, 0);
    if let Some(compiler) = Compiler::get() {
        // SAFETY: both pointers are writable.
        unsafe { (compiler.version)(&mut major, &mut minor) };
    }
    (major, minor)
}

/// Returns the path of the file that caches a program's PTX. The file's name is a hash of the source, the options and
/// the compiler's version.
fn kept(program: &Program, options: &[CString]) -> PathBuf {
    let mut hasher = DefaultHasher::new();
    (version(), &program.source, options).hash(&mut hasher);
    let folder = std::env::var_os("EMULATOR_CACHE").map(PathBuf::from);
    let folder = folder.unwrap_or_else(|| std::env::temp_dir().join("cuda-emulator"));
    folder.join(format!("{:016x}.ptx", hasher.finish()))
}

/// Writes PTX to the cache. If the write fails, the program is compiled again the next time.
fn keep(path: &std::path::Path, text: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(path);
    std::fs::create_dir_all(folder)?;
    // The file has a temporary name until it is complete. Otherwise, other processes could read or write an incomplete
    // file of the same program.
    let mut name = OsString::from(path);
    name.push(format!(".{}", std::process::id()));
    std::fs::write(&name, text)?;
    std::fs::rename(name, path)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcVersion(major: *mut c_int, minor: *mut c_int) -> Status {
    let own = version();
    // SAFETY: the caller's pointers are writable.
    unsafe {
        major.write(own.0);
        minor.write(own.1);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn nvrtcGetErrorString(_status: Status) -> *const c_char {
    c"NVRTC failed; its log has the reason".as_ptr()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcCreateProgram(
    program: *mut *mut Program,
    source: *const c_char,
    _name: *const c_char,
    headers: c_int,
    _contents: *const *const c_char,
    _names: *const *const c_char,
) -> Status {
    if headers != 0 {
        return INTERNAL_ERROR;
    }
    // SAFETY: a source is a text that ends with a zero.
    let source = unsafe { CStr::from_ptr(source) }.to_owned();
    let own = Box::new(Program {
        source,
        ptx: vec![0],
        log: vec![0],
    });
    // SAFETY: the caller's pointer is writable.
    unsafe { program.write(Box::into_raw(own)) };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcDestroyProgram(program: *mut *mut Program) -> Status {
    // SAFETY: `nvrtcCreateProgram` created the program, and the caller destroys it once.
    unsafe { drop(Box::from_raw(*program)) };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcCompileProgram(
    program: *mut Program,
    count: c_int,
    options: *const *const c_char,
) -> Status {
    // SAFETY: the program is null or exists, and no other thread uses it.
    let Some(program) = (unsafe { program.as_mut() }) else {
        return INVALID_PROGRAM;
    };
    let options: Vec<CString> = (0..count as usize)
        // SAFETY: the caller passes this number of options, each a text that ends with a zero.
        .map(|k| unsafe { CStr::from_ptr(*options.add(k)) })
        .filter(|option| option.to_bytes() != b"-lineinfo")
        .filter_map(|option| {
            // The wrapper replaces the real architecture (`sm_`) by the virtual one (`compute_`), so that the compiler
            // emits no machine code.
            CString::new(option.to_string_lossy().replace("=sm_", "=compute_")).ok()
        })
        .collect();
    let path = kept(program, &options);
    if let Ok(ptx) = std::fs::read(&path)
        && ptx.ends_with(&[0])
    {
        program.ptx = ptx;
        return SUCCESS;
    }
    let Some(compiler) = Compiler::get() else {
        return INTERNAL_ERROR;
    };
    let status = compiler.compile(program, &options);
    if status == SUCCESS
        && let Err(error) = keep(&path, &program.ptx)
    {
        eprintln!("emulator: {} is not cached: {error}", path.display());
    }
    status
}

/// Writes the size of one text of a program (its PTX or its log) to `size`.
///
/// # Safety
/// The program is null or exists, and the pointer `size` may be written.
unsafe fn size_of(
    program: *const Program,
    size: *mut usize,
    text: fn(&Program) -> &[u8],
) -> Status {
    // SAFETY: the caller guarantees that the program is null or exists.
    match unsafe { program.as_ref() } {
        Some(program) => {
            // SAFETY: the caller guarantees that `size` may be written.
            unsafe { size.write(text(program).len()) };
            SUCCESS
        }
        None => INVALID_PROGRAM,
    }
}

/// Copies one text of a program (its PTX or its log) to a buffer.
///
/// # Safety
/// The program is null or exists, and the buffer has space for the text.
unsafe fn copy_of(program: *const Program, to: *mut u8, text: fn(&Program) -> &[u8]) -> Status {
    // SAFETY: the caller guarantees that the program is null or exists.
    match unsafe { program.as_ref() } {
        Some(program) => {
            let text = text(program);
            // SAFETY: the caller guarantees that the buffer has space for the text.
            unsafe { to.copy_from_nonoverlapping(text.as_ptr(), text.len()) };
            SUCCESS
        }
        None => INVALID_PROGRAM,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetPTXSize(program: *const Program, size: *mut usize) -> Status {
    // SAFETY: the program is null or exists, and the caller's pointer is writable.
    unsafe { size_of(program, size, |program| &program.ptx) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetPTX(program: *const Program, to: *mut u8) -> Status {
    // SAFETY: the program is null or exists, and the caller's buffer has the reported size.
    unsafe { copy_of(program, to, |program| &program.ptx) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetProgramLogSize(program: *const Program, size: *mut usize) -> Status {
    // SAFETY: the program is null or exists, and the caller's pointer is writable.
    unsafe { size_of(program, size, |program| &program.log) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetProgramLog(program: *const Program, to: *mut u8) -> Status {
    // SAFETY: the program is null or exists, and the caller's buffer has the reported size.
    unsafe { copy_of(program, to, |program| &program.log) }
}
