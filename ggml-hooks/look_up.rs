//! Turns bindgen's bindings into those of a plugin: no function is linked, each is looked up when the library is loaded.
//!
//! Written to `OUT_DIR`: `ggml.rs` (types, numbers, names), and one of two files with the functions of `functions.txt`:
//! `ggml_looked_up.rs`, where each calls through a table of addresses, or, for unit tests, `ggml_linked.rs`.

use anyhow::{Context, Result, ensure};
use quote::{ToTokens, format_ident, quote};
use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::{env, fs};
use syn::{Expr, ForeignItem, ForeignItemFn, Item, ItemConst, Lit, Type};

/// The functions of ggml that the plugin calls, one in a line.
const FUNCTIONS: &str = "ggml-hooks/functions.txt";
/// Enumerations whose names ggml can be asked for: type, prefix of its constants, name of our list.
const NAMED: [(&str, &str, &str); 4] = [
    ("ggml_type", "GGML_TYPE_", "TYPE_NAMES"),
    ("ggml_op", "GGML_OP_", "OP_NAMES"),
    ("ggml_unary_op", "GGML_UNARY_OP_", "UNARY_OP_NAMES"),
    ("ggml_glu_op", "GGML_GLU_OP_", "GLU_OP_NAMES"),
];

/// Splits `OUT_DIR/ggml.rs`, which bindgen has written.
pub fn split_bindings(root: &Path) -> Result<()> {
    let list = root.join(FUNCTIONS);
    println!("cargo:rerun-if-changed={}", list.display());
    let list = fs::read_to_string(&list).with_context(|| format!("reading {FUNCTIONS}"))?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let bindings = out.join("ggml.rs");
    let text = fs::read_to_string(&bindings).context("reading the bindings")?;
    let (foreign, mut rest): (Vec<Item>, Vec<Item>) = syn::parse_file(&text)
        .context("parsing the bindings")?
        .items
        .into_iter()
        .partition(|item| matches!(item, Item::ForeignMod(_)));
    for (of, prefix, list) in NAMED {
        let item = names_of(&rest, of, prefix, list)?;
        rest.push(item);
    }
    write(&bindings, &rest)?;
    write(&out.join("ggml_linked.rs"), &foreign)?;
    let functions = list.lines().map(|name| function_named(&foreign, name)).collect::<Result<Vec<_>>>()?;
    fs::write(out.join("ggml_looked_up.rs"), looked_up(&functions)?).context("writing the bindings")
}

fn write(path: &Path, items: &[Item]) -> Result<()> {
    let text: Vec<_> = items.iter().map(|item| item.to_token_stream().to_string()).collect();
    fs::write(path, text.join("\n")).context("writing the bindings")
}

/// A list of an enumeration's constants: number and name without the prefix.
fn names_of(items: &[Item], of: &str, prefix: &str, list: &str) -> Result<Item> {
    let is_of = |item: &ItemConst| matches!(&*item.ty, Type::Path(path) if path.path.is_ident(of));
    let number = |item: &ItemConst| match &*item.expr {
        Expr::Lit(expr) => match &expr.lit {
            Lit::Int(number) => number.base10_parse::<u32>().ok(),
            _ => None,
        },
        _ => None,
    };
    let mut names = Vec::new();
    for item in items {
        if let Item::Const(item) = item
            && is_of(item)
            && let Some(name) = item.ident.to_string().strip_prefix(prefix)
            && name != "COUNT"
        {
            names.push((number(item).with_context(|| format!("the number of {prefix}{name}"))?, name.to_owned()));
        }
    }
    ensure!(!names.is_empty(), "{of}: the bindings hold no constant of this type");
    names.sort_unstable();
    let (list, numbers, names) = (format_ident!("{list}"), names.iter().map(|n| n.0), names.iter().map(|n| &n.1));
    Ok(syn::parse2(quote! { pub const #list: &[(u32, &str)] = &[#((#numbers, #names)),*]; })?)
}

fn function_named<'a>(foreign: &'a [Item], name: &str) -> Result<&'a ForeignItemFn> {
    let blocks = foreign.iter().filter_map(|item| if let Item::ForeignMod(block) = item { Some(block) } else { None });
    let mut functions = blocks.flat_map(|block| &block.items).filter_map(|item| match item {
        ForeignItem::Fn(function) => Some(function),
        _ => None,
    });
    let found = functions.find(|function| function.sig.ident == name);
    let found = found.with_context(|| format!("{FUNCTIONS}: {name}: this llama.cpp declares no such function"))?;
    ensure!(
        found.sig.variadic.is_none(),
        "{FUNCTIONS}: {name}: takes any number of arguments, and cannot be passed on"
    );
    Ok(found)
}

/// The table of addresses, and for each function one of the same name that calls through it.
fn looked_up(functions: &[&ForeignItemFn]) -> Result<String> {
    let count = functions.len();
    let names =
        functions.iter().map(|function| CString::new(function.sig.ident.to_string())).collect::<Result<Vec<_>, _>>()?;
    let table = quote! {
        static ADDRESSES: [::std::sync::atomic::AtomicPtr<::std::os::raw::c_void>; #count] =
            [const { ::std::sync::atomic::AtomicPtr::new(::std::ptr::null_mut()) }; #count];
        const NAMES: [&::std::ffi::CStr; #count] = [#(#names),*];

        /// Looks every function up. Answers with the name of the first that is not found; the others can be called.
        pub fn look_up(
            find: impl Fn(&::std::ffi::CStr) -> Option<::std::ptr::NonNull<::std::os::raw::c_void>>,
        ) -> Option<&'static ::std::ffi::CStr> {
            let mut missing = None;
            for (name, address) in NAMES.iter().zip(&ADDRESSES) {
                match find(name) {
                    Some(found) => address.store(found.as_ptr(), ::std::sync::atomic::Ordering::Release),
                    None => missing = missing.or(Some(*name)),
                }
            }
            missing
        }

        /// Whether a function has been looked up and found.
        pub fn is_found(name: &::std::ffi::CStr) -> bool {
            let mut table = NAMES.iter().zip(&ADDRESSES);
            table.any(|(n, address)| *n == name && !address.load(::std::sync::atomic::Ordering::Acquire).is_null())
        }

        #[inline]
        fn address(index: usize) -> *mut ::std::os::raw::c_void {
            let address = ADDRESSES[index].load(::std::sync::atomic::Ordering::Acquire);
            if address.is_null() { not_found(index) }
            address
        }

        /// Never reached: nothing is called before all are found, but for what `is_found` has been asked about.
        #[cold]
        fn not_found(index: usize) -> ! {
            let name = NAMES.get(index);
            eprintln!("moe-hot: internal error: {name:?} is called and not looked up; please report it");
            ::std::process::abort()
        }
    };
    let wrappers = functions.iter().enumerate().map(|(index, function)| {
        let (name, inputs, output) = (&function.sig.ident, &function.sig.inputs, &function.sig.output);
        let typed =
            || inputs.iter().filter_map(|input| if let syn::FnArg::Typed(typed) = input { Some(typed) } else { None });
        let (arguments, types) = (typed().map(|typed| &typed.pat), typed().map(|typed| &typed.ty));
        quote! {
            #[inline]
            pub unsafe fn #name(#inputs) #output {
                type Function = unsafe extern "C" fn(#(#types),*) #output;
                ::std::mem::transmute::<*mut ::std::os::raw::c_void, Function>(address(#index))(#(#arguments),*)
            }
        }
    });
    Ok(quote! { #table #(#wrappers)* }.to_string())
}
