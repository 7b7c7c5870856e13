//! The frame of pages that commands write: one file for light and dark, narrow and wide, that asks for nothing outside itself.

use maud::{DOCTYPE, Markup, PreEscaped, html};

const STYLE: &str = include_str!("page.css");

/// A whole page. `more_style`: rules besides those that all pages have.
pub fn page(title: &str, more_style: &str, content: &Markup) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'";
                title { (title) }
                style { (PreEscaped(STYLE)) (PreEscaped(more_style)) }
            }
            body {
                main {
                    h1 { (title) }
                    (content)
                }
            }
        }
    };
    page.into_string()
}
