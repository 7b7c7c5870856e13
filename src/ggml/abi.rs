//! Is the ggml that has loaded us one that we serve?
//!
//! It is known by its layouts, not by its name: the version of its tables, the sizes of its structs, the names of its types
//! and operations by number, which entries of its own tables are set, and where functions find what we read from structs.
//! The order matters: what is looked at first tells whether the next can be looked at without a crash.

use super::host_library::Constants;
use super::revisions::{BackendApi, served};
use super::{Backend, BufferType, Device, HostLibrary, c_text, sys};
use crate::{Error, Result};
use std::ffi::{c_char, c_void};
use std::mem::size_of;

/// The llama.cpp commit that programs are built from by `scripts/setup`.
pub const COMMIT: &str = env!("LLAMA_COMMIT");
/// Shortest abbreviation of a commit that we take for a name.
const MIN_ABBREVIATION: usize = 7;

/// `sizeof(struct ggml_object)`, which ggml.c keeps to itself: two sizes, a pointer, an enum and padding.
const OBJECT_SIZE: usize = 32;

/// Whether `commit`, abbreviated or not, names ours.
pub fn is_our_commit(commit: &str) -> bool {
    is_commit(commit) && COMMIT.starts_with(commit)
}

/// Whether `word` can be the name of a commit.
pub fn is_commit(word: &str) -> bool {
    word.len() >= MIN_ABBREVIATION && word.chars().all(|c| c.is_ascii_hexdigit())
}

/// Looks up the functions of the ggml that the code at `caller` is of, and compares its layouts with those that we know.
///
/// To be called once, before anything else of this module is. Where it fails nothing else may be, but `log`.
pub fn join_host(caller: *const c_void) -> Result<BackendApi> {
    let library = HostLibrary::of_caller(caller).map_err(|error| Error::Host(error.to_string()))?;
    let missing = sys::look_up(|name| library.function(name));
    let file = library.file();
    library.keep();
    let found = |what: String| {
        let host = [host_version(), file.clone()].into_iter().flatten().collect::<Vec<_>>().join(", ");
        Error::Host(format!("{what} (ggml {host}); {}", served()))
    };
    let api = api_version().map_err(&found)?;
    let api = BackendApi::of_number(api).ok_or_else(|| found(format!("backend API {api}")))?;
    if let Some(missing) = missing {
        return Err(found(format!("no function {}", missing.to_string_lossy())));
    }
    Device::cpu()?;
    check_sizes().and_then(|()| check_names()).map_err(&found)?;
    check_tables(api).map_err(|error| match error {
        Error::Layout(what) => found(what.into()),
        other => other,
    })?;
    Ok(api)
}

/// What the host says it is.
fn host_version() -> Option<String> {
    if !sys::is_found(c"ggml_version") || !sys::is_found(c"ggml_commit") {
        return None;
    }
    // SAFETY: both have been found and return static strings.
    let (version, commit) = unsafe { (c_text(sys::ggml_version()), c_text(sys::ggml_commit())) };
    Some(format!("{version}, commit {commit}"))
}

/// The version that all loaded registries state, in the first word that each has had in every version.
fn api_version() -> Result<i32, String> {
    for needed in [c"ggml_backend_reg_count", c"ggml_backend_reg_get"] {
        if !sys::is_found(needed) {
            return Err(format!("no function {}", needed.to_string_lossy()));
        }
    }
    // SAFETY: takes no arguments.
    let count = unsafe { sys::ggml_backend_reg_count() };
    // SAFETY: the index is below the count.
    let registries = (0..count).map(|index| unsafe { sys::ggml_backend_reg_get(index) }).filter(|reg| !reg.is_null());
    // SAFETY: a registered registry begins with its version.
    let mut versions: Vec<i32> = registries.map(|registry| unsafe { *registry.cast::<i32>() }).collect();
    versions.sort_unstable();
    versions.dedup();
    match versions.as_slice() {
        [] => Err("no backend is loaded".to_owned()),
        [one] => Ok(*one),
        [one, .., another] => Err(format!("backends of API {one} beside others of API {another}")),
    }
}

fn expect(what: &str, host: usize, known: usize) -> Result<(), String> {
    if host == known { Ok(()) } else { Err(format!("{what} {host} instead of {known}")) }
}

/// Compares what the host computes from its own structs with what we compute from ours.
fn check_sizes() -> Result<(), String> {
    // SAFETY: takes no arguments.
    let tensor_overhead = unsafe { sys::ggml_tensor_overhead() };
    expect("tensors of size", tensor_overhead, OBJECT_SIZE + size_of::<sys::ggml_tensor>())?;
    // SAFETY: takes plain numbers.
    let graph_overhead = unsafe { sys::ggml_graph_overhead_custom(1, false) };
    expect("graphs of size", graph_overhead, graph_overhead_of_one_node())
}

/// What `ggml_graph_overhead_custom(1, false)` answers for our `ggml_cgraph` (ggml.c, `ggml_graph_nbytes`):
/// the struct, one node, one leaf, and for a hash table of 2: use counts, keys and one word of bits.
fn graph_overhead_of_one_node() -> usize {
    const ALIGN: usize = sys::GGML_MEM_ALIGN as usize;
    let pointer = size_of::<*const sys::ggml_tensor>();
    let bytes = size_of::<sys::ggml_cgraph>() + 2 * pointer + 2 * size_of::<i32>() + 2 * pointer + size_of::<u32>();
    OBJECT_SIZE + bytes.next_multiple_of(ALIGN)
}

/// Asks for the name of every number that we know, from 0 up, and stops at the first that differs: so no table is read
/// further than one entry behind its end.
fn check_names() -> Result<(), String> {
    type Names = &'static [(u32, &'static str)];
    type NameOf = fn(u32) -> *const c_char;
    // SAFETY: each reads an entry of a table of constants, or, once, the word behind it.
    let tables: [(&str, Names, NameOf); 4] = unsafe {
        [
            ("operation", sys::OP_NAMES, |number| sys::ggml_op_name(number)),
            ("unary operation", sys::UNARY_OP_NAMES, |number| sys::ggml_unary_op_name(number)),
            ("GLU operation", sys::GLU_OP_NAMES, |number| sys::ggml_glu_op_name(number)),
            ("type", sys::TYPE_NAMES, |number| sys::ggml_type_name(number)),
        ]
    };
    let constants = Constants::loaded();
    for (what, names, name_of) in tables {
        for (number, name) in names {
            // SAFETY: the host's ggml stays loaded.
            if !unsafe { constants.is_text(name_of(*number), name) } {
                return Err(format!("another {what} {number} than {name}"));
            }
        }
    }
    Ok(())
}

/// Which entries of a table are set: bit 0 for the first.
///
/// # Safety
/// `table` points to `entries` function pointers.
unsafe fn entries_set(table: *const c_void, entries: usize) -> u32 {
    // SAFETY: passed on from the caller.
    let table = unsafe { std::slice::from_raw_parts(table.cast::<usize>(), entries) };
    table.iter().enumerate().map(|(index, entry)| u32::from(*entry != 0) << index).sum()
}

/// Compares the tables of the CPU backend, and what we read from behind a table with what the host's functions say.
fn check_tables(api: BackendApi) -> Result<()> {
    const POINTER: usize = size_of::<usize>();
    let expect = |what, host: usize, known: usize| if host == known { Ok(()) } else { Err(Error::Layout(what)) };

    let cpu = Device::cpu()?;
    let device = cpu.as_raw();
    let entries = size_of::<sys::ggml_backend_device_i>() / POINTER;
    // SAFETY: the device is registered and begins with its table; what is read behind it, is what is tested.
    let (set, host, ours) =
        unsafe { (entries_set(device.cast(), entries), sys::ggml_backend_dev_backend_reg(device), (*device).reg) };
    // All up to `get_buffer_type`, then `buffer_from_host_ptr`, `supports_op` and `supports_buft`.
    expect("another table of devices", set as usize, 0b111_0111_1111)?;
    expect("another layout of devices", host as usize, ours as usize)?;

    let plain = BufferType::cpu().ok_or(Error::Ggml("a CPU buffer type"))?.as_raw();
    // `get_name`, `alloc_buffer`, `get_alignment` and `is_host`.
    let (entries, known) = match api {
        BackendApi::V2 => (6, 0b10_0111),
        BackendApi::V3 => (8, 0b1000_1011),
    };
    // SAFETY: a buffer type has at least 8 words: 6 of the older table, device and context.
    let set = unsafe { entries_set(plain.cast(), entries) };
    expect("another table of buffer types", set as usize, known)?;

    // SAFETY: the buffer type is registered; asking for one alignment's worth of memory.
    let buffer = unsafe { sys::ggml_backend_buft_alloc_buffer(plain, 64) };
    if buffer.is_null() {
        return Err(Error::Ggml("a buffer"));
    }
    // SAFETY: the buffer is valid until freed below; the fields read lie behind its whole interface.
    let (size, kind) = unsafe {
        let size = (sys::ggml_backend_buffer_get_size(buffer), (*buffer).size);
        let kind = (sys::ggml_backend_buffer_get_type(buffer), (*buffer).buft);
        sys::ggml_backend_buffer_free(buffer);
        (size, kind)
    };
    expect("another layout of buffers", size.0, size.1)?;
    expect("another layout of buffers", kind.0 as usize, kind.1 as usize)?;

    let backend = Backend::new(cpu)?;
    let instance = backend.as_raw();
    let entries = size_of::<sys::ggml_backend_i>() / POINTER;
    // SAFETY: the instance is alive; its table lies behind a pointer to its identifier, and its device behind that.
    let (set, ours) = unsafe { (entries_set((&raw const (*instance).iface).cast(), entries), (*instance).device) };
    // `get_name`, `free`, plans (`create`, `free`, `compute`) and `graph_compute`.
    expect("another table of backends", set as usize, 0b1_1011_0000_0011)?;
    expect("another layout of backends", device as usize, ours as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ggml_that_tests_link_is_served() {
        crate::ggml::testing::load_cpu();
        assert_eq!(join_host(std::ptr::null()).unwrap(), BackendApi::V2);
    }

    #[test]
    fn every_table_of_the_other_api_is_told_apart() {
        crate::ggml::testing::load_cpu();
        assert!(matches!(check_tables(BackendApi::V3), Err(Error::Layout("another table of buffer types"))));
        assert!(check_tables(BackendApi::V2).is_ok());
    }

    #[test]
    fn an_abbreviated_commit_names_ours() {
        assert!(is_our_commit(&COMMIT[..9]) && is_our_commit(COMMIT));
        assert!(!is_our_commit("deadbeef0") && !is_our_commit(&COMMIT[..3]), "too short to name a commit");
    }
}
