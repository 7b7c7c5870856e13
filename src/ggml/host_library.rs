//! Finding the copy of ggml that has loaded us, wherever it lies and however it was opened: in libraries of any name, in a
//! program's own addon, or in the program itself. Nothing here depends on a file's name.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr::NonNull;

/// What every ggml that can load backends has. Where it is defined, there is the registry that we are to join.
const REGISTRY: &CStr = c"ggml_backend_reg_count";

/// A copy of ggml in this process. Stays loaded from now on.
#[derive(Debug)]
pub struct HostLibrary {
    handle: Handle,
}

/// Why no copy of ggml can be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotFound {
    /// There is none, or none whose functions can be looked up.
    #[error("no ggml in this process whose functions can be looked up: its symbols are hidden, or it is not loaded")]
    None,
    /// There are several, and none of them has loaded us.
    #[error("this process holds {0} copies of ggml, and none of them has loaded this plugin")]
    Several(usize),
}

impl HostLibrary {
    /// The copy that the code at `caller` is of, or uses; with no such, the only one in this process.
    pub fn of_caller(caller: *const c_void) -> Result<Self, NotFound> {
        let objects = loaded_objects();
        let of_caller = objects.iter().find(|object| object.contains(caller as usize));
        if let Some(handle) = of_caller.and_then(Object::open).filter(|handle| handle.find(REGISTRY).is_some()) {
            return Ok(Self { handle });
        }
        let mut found: Vec<Handle> = objects.iter().filter_map(Object::with_registry).collect();
        match (found.pop(), found.len()) {
            (Some(handle), 0) => Ok(Self { handle }),
            (None, _) => Err(NotFound::None),
            (Some(_), others) => Err(NotFound::Several(others + 1)),
        }
    }

    /// A function of this copy.
    pub fn function(&self, name: &CStr) -> Option<NonNull<c_void>> {
        self.handle.find(name)
    }

    /// The file that its registry lies in; `None` for the program itself.
    pub fn file(&self) -> Option<String> {
        let registry = self.function(REGISTRY)?.as_ptr() as usize;
        let object = loaded_objects().into_iter().find(|object| object.contains(registry))?;
        let path = object.name.to_string_lossy();
        (!path.is_empty()).then(|| path.into_owned())
    }

    /// Keeps it loaded until the process ends: functions of it are called from now on.
    pub fn keep(self) {
        std::mem::forget(self.handle);
    }
}

/// The memory that constants of what is loaded lie in.
pub struct Constants(Vec<std::ops::Range<usize>>);

impl Constants {
    /// Of all that is loaded now.
    pub fn loaded() -> Self {
        Self(loaded_objects().into_iter().flat_map(|object| object.readable).collect())
    }

    /// Whether the text at `text` is `expected`, in capitals or not. Any address may be given: nothing is read outside what is loaded.
    ///
    /// # Safety
    /// What was loaded when this was made is still loaded.
    pub unsafe fn is_text(&self, text: *const c_char, expected: &str) -> bool {
        let (start, length) = (text as usize, expected.len() + 1);
        let range = self.0.iter().find(|range| range.contains(&start));
        if range.is_none_or(|range| range.end - start < length) {
            return false;
        }
        // SAFETY: the range is mapped and readable as long as its object is loaded, which the caller vouches for.
        let found = unsafe { std::slice::from_raw_parts(text.cast::<u8>(), length) };
        found.split_last().is_some_and(|(end, text)| *end == 0 && text.eq_ignore_ascii_case(expected.as_bytes()))
    }
}

/// A program or library in memory.
struct Object {
    /// Its path; empty for the program.
    name: CString,
    /// The addresses of all its parts.
    all: Vec<std::ops::Range<usize>>,
    /// Those that can be read.
    readable: Vec<std::ops::Range<usize>>,
}

impl Object {
    fn contains(&self, address: usize) -> bool {
        self.all.iter().any(|range| range.contains(&address))
    }

    fn open(&self) -> Option<Handle> {
        let name = if self.name.is_empty() { std::ptr::null() } else { self.name.as_ptr() };
        // SAFETY: a NUL-terminated path or NULL for the program; with RTLD_NOLOAD no code of a library runs.
        NonNull::new(unsafe { libc::dlopen(name, libc::RTLD_LAZY | libc::RTLD_NOLOAD) }).map(Handle)
    }

    /// A handle, if the registry is defined in this very object.
    fn with_registry(&self) -> Option<Handle> {
        let handle = self.open()?;
        let registry = handle.find(REGISTRY)?;
        self.contains(registry.as_ptr() as usize).then_some(handle)
    }
}

/// All objects of this process, the program first.
fn loaded_objects() -> Vec<Object> {
    let mut objects: Vec<Object> = Vec::new();
    // SAFETY: the callback gets back the pointer that is passed here, and only during this call.
    unsafe { libc::dl_iterate_phdr(Some(add_object), (&raw mut objects).cast()) };
    objects
}

/// # Safety
/// `info` is valid and `objects` points to a `Vec<Object>`, as `loaded_objects` arranges.
unsafe extern "C" fn add_object(info: *mut libc::dl_phdr_info, _: usize, objects: *mut c_void) -> c_int {
    // SAFETY: the caller vouches for both; the headers are an array of the given length.
    let (info, objects) = unsafe { (&*info, &mut *objects.cast::<Vec<Object>>()) };
    let headers = if info.dlpi_phdr.is_null() {
        &[][..]
    } else {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) }
    };
    let name = if info.dlpi_name.is_null() {
        CString::default()
    } else {
        // SAFETY: the name is NUL-terminated.
        unsafe { CStr::from_ptr(info.dlpi_name) }.to_owned()
    };
    let loaded = headers.iter().filter(|header| header.p_type == libc::PT_LOAD);
    let range = |header: &libc::Elf64_Phdr| {
        let start = info.dlpi_addr.wrapping_add(header.p_vaddr) as usize;
        start..start.saturating_add(header.p_memsz as usize)
    };
    objects.push(Object {
        name,
        all: loaded.clone().map(range).collect(),
        readable: loaded.filter(|header| header.p_flags & libc::PF_R != 0).map(range).collect(),
    });
    0
}

/// What the system's loader knows an object by.
#[derive(Debug)]
struct Handle(NonNull<c_void>);

impl Handle {
    /// A symbol of the object or of what it was linked with.
    fn find(&self, name: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: the handle is open and the name NUL-terminated.
        NonNull::new(unsafe { libc::dlsym(self.0.as_ptr(), name.as_ptr()) })
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: the handle is open and is not used again.
        unsafe { libc::dlclose(self.0.as_ptr()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ggml::sys;

    #[test]
    fn the_ggml_that_tests_link_is_found_from_anywhere() {
        // ggml-base alone has no registry and uses none; there is one copy only, so it is that.
        for caller in [std::ptr::null(), sys::ggml_version as *const c_void, sys::ggml_backend_load as *const c_void] {
            let library = HostLibrary::of_caller(caller).unwrap();
            assert!(library.file().unwrap().contains("libggml.so"));
            let function = library.function(c"ggml_version").unwrap();
            assert_eq!(function.as_ptr().cast_const(), sys::ggml_version as *const c_void);
        }
    }

    #[test]
    fn no_function_is_made_up() {
        let library = HostLibrary::of_caller(std::ptr::null()).unwrap();
        assert_eq!(library.function(c"ggml_no_such_function"), None);
    }

    #[test]
    fn text_is_compared_wherever_it_may_be() {
        // SAFETY: takes a number in range.
        let name = unsafe { sys::ggml_op_name(sys::GGML_OP_MUL_MAT_ID) };
        let constants = Constants::loaded();
        // SAFETY: nothing is unloaded meanwhile.
        let is_text = |text, expected| unsafe { constants.is_text(text, expected) };
        assert!(is_text(name, "MUL_MAT_ID"));
        assert!(!is_text(name, "MUL_MAT") && !is_text(name, "MUL_MAT_ID_"), "the end counts");
        assert!(!is_text(std::ptr::null(), "MUL_MAT_ID") && !is_text(std::ptr::without_provenance(16), ""));
        let elsewhere = c"x".to_owned();
        assert!(!is_text(elsewhere.as_ptr(), "x"), "names are constants of a library");
    }
}
