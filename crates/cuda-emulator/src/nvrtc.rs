//! NVIDIA's runtime compiler, in front of the real one: it asks for PTX alone, without machine code, and keeps what it got on disk.
#![allow(non_snake_case)]

use std::ffi::{CStr, CString, OsString, c_char, c_int, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;
use std::sync::OnceLock;

type Status = c_int;

const SUCCESS: Status = 0;
const INVALID_PROGRAM: Status = 4;
/// Of the compiler itself.
const INTERNAL_ERROR: Status = 11;

/// The real compiler's library, where `EMULATOR_NVRTC` does not say which.
const LIBRARY: &str = "libnvrtc.so.13";

/// A program as this library knows it. Texts end with a 0, as their sizes count.
struct Program {
    source: CString,
    ptx: Vec<u8>,
    log: Vec<u8>,
}

unsafe extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// All symbols at once.
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

/// The real compiler.
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
    /// The one compiler of this process, or `None` where there is none.
    fn get() -> Option<&'static Self> {
        static COMPILER: OnceLock<Option<Compiler>> = OnceLock::new();
        COMPILER
            .get_or_init(|| {
                let name = std::env::var("EMULATOR_NVRTC").unwrap_or(LIBRARY.into());
                let compiler = Self::open(&name);
                if compiler.is_none() {
                    eprintln!("emulator: no NVRTC at {name}; EMULATOR_NVRTC says where it is");
                }
                compiler
            })
            .as_ref()
    }

    fn open(name: &str) -> Option<Self> {
        let name = CString::new(name).ok()?;
        // SAFETY: a name that ends; the library's constructors are NVIDIA's.
        let library = unsafe { dlopen(name.as_ptr(), NOW) };
        if library.is_null() {
            return None;
        }
        // SAFETY: these are NVRTC's functions and their types, which its header has.
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

    /// Compiles, and fills in what the program then has.
    fn compile(&self, program: &mut Program, options: &[CString]) -> Status {
        let mut real = std::ptr::null_mut();
        let none = std::ptr::null();
        // SAFETY: the source ends, and there are no headers.
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
        // SAFETY: the program exists until it is destroyed below, and there are so many options.
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

/// # Safety
/// The symbol is a function of this type.
unsafe fn symbol<T: Copy>(library: *mut c_void, name: &CStr) -> Option<T> {
    // SAFETY: an open library and a name that ends.
    let found = unsafe { dlsym(library, name.as_ptr()) };
    // SAFETY: the caller's; functions and pointers have one size.
    (!found.is_null()).then(|| unsafe { std::mem::transmute_copy(&found) })
}

/// A text of a program's, by the functions that say its size and write it.
///
/// # Safety
/// The program exists.
unsafe fn text(program: *mut c_void, size: GetSize, get: GetText) -> Vec<u8> {
    let mut bytes = 0;
    // SAFETY: the caller's; the text has as many bytes as are said.
    unsafe {
        size(program, &mut bytes);
        let mut text = vec![0; bytes.max(1)];
        get(program, text.as_mut_ptr());
        text
    }
}

/// The real compiler's version, or that which CubeCL is built for.
pub fn version() -> (c_int, c_int) {
    let (mut major, mut minor) = (13, 0);
    if let Some(compiler) = Compiler::get() {
        // SAFETY: two places.
        unsafe { (compiler.version)(&mut major, &mut minor) };
    }
    (major, minor)
}

/// Where PTX is kept: by what it was made of.
fn kept(program: &Program, options: &[CString]) -> PathBuf {
    let mut hasher = DefaultHasher::new();
    (version(), &program.source, options).hash(&mut hasher);
    let folder = std::env::var_os("EMULATOR_CACHE").map(PathBuf::from);
    let folder = folder.unwrap_or_else(|| std::env::temp_dir().join("cuda-emulator"));
    folder.join(format!("{:016x}.ptx", hasher.finish()))
}

/// Keeps a text; where that fails it is made again the next time.
fn keep(path: &std::path::Path, text: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(path);
    std::fs::create_dir_all(folder)?;
    // Under a name of its own until it is complete: several processes may make it.
    let mut name = OsString::from(path);
    name.push(format!(".{}", std::process::id()));
    std::fs::write(&name, text)?;
    std::fs::rename(name, path)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcVersion(major: *mut c_int, minor: *mut c_int) -> Status {
    let own = version();
    // SAFETY: the caller's places.
    unsafe {
        major.write(own.0);
        minor.write(own.1);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn nvrtcGetErrorString(_status: Status) -> *const c_char {
    c"NVRTC failed; its log says why".as_ptr()
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
    // SAFETY: a source is a text that ends.
    let source = unsafe { CStr::from_ptr(source) }.to_owned();
    let own = Box::new(Program {
        source,
        ptx: vec![0],
        log: vec![0],
    });
    // SAFETY: the caller's place.
    unsafe { program.write(Box::into_raw(own)) };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcDestroyProgram(program: *mut *mut Program) -> Status {
    // SAFETY: `nvrtcCreateProgram` made it, and the caller destroys it once.
    unsafe { drop(Box::from_raw(*program)) };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcCompileProgram(
    program: *mut Program,
    count: c_int,
    options: *const *const c_char,
) -> Status {
    // SAFETY: a program that the caller has, alone.
    let Some(program) = (unsafe { program.as_mut() }) else {
        return INVALID_PROGRAM;
    };
    let options: Vec<CString> = (0..count as usize)
        // SAFETY: there are so many, and each is a text that ends.
        .map(|k| unsafe { CStr::from_ptr(*options.add(k)) })
        .filter(|option| option.to_bytes() != b"-lineinfo")
        .filter_map(|option| {
            // For an architecture as such there is no machine code to be made.
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
        eprintln!("emulator: {} is not kept: {error}", path.display());
    }
    status
}

/// Writes a text's size.
///
/// # Safety
/// The program is null or exists, and the place may be written.
unsafe fn size_of(
    program: *const Program,
    size: *mut usize,
    text: fn(&Program) -> &[u8],
) -> Status {
    // SAFETY: the caller's.
    match unsafe { program.as_ref() } {
        Some(program) => {
            // SAFETY: the caller's.
            unsafe { size.write(text(program).len()) };
            SUCCESS
        }
        None => INVALID_PROGRAM,
    }
}

/// Writes a text.
///
/// # Safety
/// The program is null or exists, and there is room for the text.
unsafe fn copy_of(program: *const Program, to: *mut u8, text: fn(&Program) -> &[u8]) -> Status {
    // SAFETY: the caller's.
    match unsafe { program.as_ref() } {
        Some(program) => {
            let text = text(program);
            // SAFETY: the caller's.
            unsafe { to.copy_from_nonoverlapping(text.as_ptr(), text.len()) };
            SUCCESS
        }
        None => INVALID_PROGRAM,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetPTXSize(program: *const Program, size: *mut usize) -> Status {
    // SAFETY: the caller's program and place.
    unsafe { size_of(program, size, |program| &program.ptx) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetPTX(program: *const Program, to: *mut u8) -> Status {
    // SAFETY: the caller's program, and as much room as it was told.
    unsafe { copy_of(program, to, |program| &program.ptx) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetProgramLogSize(program: *const Program, size: *mut usize) -> Status {
    // SAFETY: the caller's program and place.
    unsafe { size_of(program, size, |program| &program.log) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetProgramLog(program: *const Program, to: *mut u8) -> Status {
    // SAFETY: the caller's program, and as much room as it was told.
    unsafe { copy_of(program, to, |program| &program.log) }
}
