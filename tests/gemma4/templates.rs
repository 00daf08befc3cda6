//! Tests chat templates from unknown sources. The loader finds templates in the same files as Hugging Face Transformers
//! does. Limits bound the computation and the output of a template.

use burn_gemma4::{ChatOptions, ChatTemplate, Gemma4Error, Message};
use serde_json::{Value, json};
use std::fs;
use std::time::{Duration, Instant};
use tempfile::TempDir;

fn render(template: &ChatTemplate) -> Result<String, Gemma4Error> {
    template.render(&[Message::user("hi")], ChatOptions::default())
}

/// Asserts that the template `source` is refused within a time limit, with an error that contains `words`.
#[track_caller]
fn assert_refused(source: &str, words: &[&str]) {
    let start = Instant::now();
    let refused = ChatTemplate::from_source(source).and_then(|template| render(&template));
    let Err(error) = refused else {
        panic!("{source} should be refused");
    };
    assert!(matches!(error, Gemma4Error::ChatTemplate(_)), "{error:?}");
    for word in words {
        assert!(
            error.to_string().contains(word),
            "{source}: {word:?} is missing from {error}"
        );
    }
    assert!(
        start.elapsed() < Duration::from_secs(120),
        "{source} took {:?}",
        start.elapsed()
    );
}

#[test]
fn template_with_huge_indent_is_refused() {
    for width in ["10**12", "10**6", "-1"] {
        assert_refused(
            &format!("{{{{ messages | tojson(indent={width}) }}}}"),
            &["chat_template.jinja:1"],
        );
    }
    assert_refused(
        "{{ messages | tojson(indent=10**12) }}",
        &["tojson", "indent"],
    );
}

#[test]
fn template_with_huge_loops_is_refused() {
    let nested = |depth: usize, body: &str| {
        let begin: String = (0..depth)
            .map(|level| format!("{{% for i{level} in range(100000) %}}"))
            .collect();
        begin + body + &"{% endfor %}".repeat(depth)
    };
    assert_refused(&nested(3, ""), &["instructions"]);
    assert_refused(&nested(4, "{% set x = 1 %}"), &["instructions"]);
    // The text is so long that the limit on bytes is reached before the time limit, even on a busy machine.
    let words = "endless words ".repeat(1000);
    assert_refused(&nested(2, &format!("{{{{ '{words}' }}}}")), &["bytes"]);
    assert_refused(&nested(2, &words), &["bytes"]);
    let kept = nested(2, &words);
    assert_refused(&format!("{{% set text %}}{kept}{{% endset %}}"), &["bytes"]);
    let written = nested(2, "{{ messages[0]['content'] * 20000 }}");
    assert_refused(
        &format!("{{% macro f() %}}{written}{{% endmacro %}}{{% set text = f() %}}"),
        &["bytes"],
    );
}

#[test]
fn template_with_deep_recursion_is_refused() {
    assert_refused(
        "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
        &["recursion"],
    );
    let deep = "(".repeat(100_000) + "1" + &")".repeat(100_000);
    assert_refused(&format!("{{{{ {deep} }}}}"), &["recursion"]);
}

/// A template that doubles a text in each of forty steps is refused, because the text would not fit in memory.
#[test]
fn template_that_doubles_a_text_is_refused() {
    let step = |step: &str| {
        format!(
            "{{% set text = 'endless' %}}{}{{{{ text | length }}}}",
            step.repeat(40)
        )
    };
    for doubling in [
        "{% set text = text ~ text %}",
        "{% set text = text + text %}",
        "{% set text = text * 2 %}",
        "{% set text = [text, text] | join %}",
        "{% set text = ''.join([text, text]) %}",
        "{% set text = text | replace('e', 'ee') %}",
        "{% set text = text.replace('e', 'ee') %}",
        "{% set text = '%s%s' | format(text, text) %}",
        "{% set text = '{}{}'.format(text, text) %}",
        "{% set text %}{{ text }}{{ text }}{% endset %}",
        "{% set text = [text, text] | tojson %}",
        "{% set text = [text, text] | string %}",
        "{% set text = (text ~ '\n' ~ text) | indent(4) %}",
    ] {
        assert_refused(&step(doubling), &["chat template: "]);
    }
    let lists = |step: &str| {
        format!(
            "{{% set list = [1, 2] %}}{}{{{{ list | length }}}}",
            step.repeat(40)
        )
    };
    for doubling in [
        "{% set list = list + list %}",
        "{% set list = (list + list) | list %}",
        "{% set list = list * 10 %}",
        "{% set list = (list * 10) | list %}",
    ] {
        assert_refused(&lists(doubling), &["chat template: "]);
    }
}

#[test]
fn template_with_one_huge_step_is_refused() {
    for step in [
        "'x' * 10**12",
        "'x' * 99999999 ~ 'x' * 99999999",
        "('x' * 10**7) | replace('x', 'x' * 10**7)",
        "('x' * 10**7).replace('', 'x' * 10**7)",
        "('\n' * 10**6) | indent(10**6, true, true)",
        "'x' | indent(10**12, true)",
        "'%1000000000000d' | format(1)",
        "'%.1000000000d' | format(1)",
        "'{:1000000000000}'.format(1)",
        "([1] * 10**12) | list",
        "([1] * 10**12) | join",
        "([1] * 10**12) | sort",
        "[1] | slice(10**12) | list",
        "[1] | batch(10**12, 0) | list",
        "(['x' * 10**7] * 10**5) | sum",
        "(['x' * 10**7] * 10**5) | tojson",
        "(['x' * 10**7] * 10**5) | string",
        "dict(x=['x' * 10**7] * 10**5) | pprint",
    ] {
        assert_refused(&format!("{{{{ {step} }}}}"), &["chat template: "]);
        assert_refused(
            &format!("{{% set text = {step} %}}{{{{ text | length }}}}"),
            &["chat template: "],
        );
    }
}

/// A template that nests lists deeper than the stack allows is refused.
#[test]
fn template_with_deeply_nested_lists_is_refused() {
    for step in [
        "[ns.list]",
        "{'list': ns.list}",
        "ns.list[0:]",
        "dict(x=ns.list)",
        "[ns.list] | list",
        "namespace(list=ns.list)",
    ] {
        assert_refused(
            &format!(
                "{{% set ns = namespace(list=[1]) %}}{{% for i in range(99999) %}}{{% for j in range(99) %}}\
                 {{% set ns.list = {step} %}}{{% endfor %}}{{% endfor %}}{{{{ ns.list | length }}}}"
            ),
            &["chat template: "],
        );
    }
}

/// A template with a value that contains itself is refused, because printing or comparing such a value would never end.
#[test]
fn template_with_a_circular_value_is_refused() {
    for circle in [
        "{% set ns.self = ns %}",
        "{% set ns.self = [1, [ns]] %}",
        "{% set ns.self = {'self': ns} %}",
        "{% set other = namespace(ns=ns) %}",
    ] {
        assert_refused(
            &format!("{{% set ns = namespace() %}}{circle}{{{{ ns }}}}{{{{ ns == namespace() }}}}"),
            &["namespace"],
        );
    }
    // A list may contain another list twice. If a template nests lists in this way forty times, the number of elements
    // doubles forty times, so the template is refused.
    let double = "{% set list = [list, list] %}".repeat(40);
    assert_refused(
        &format!("{{% set list = [1] %}}{double}{{{{ list == [list] }}}}"),
        &["more than"],
    );
}

/// A template that includes another template or itself is refused, because a checkpoint has only one template.
#[test]
fn template_that_includes_a_template_is_refused() {
    for step in ["include", "extends"] {
        assert_refused(
            &format!("{{% {step} 'chat_template.jinja' %}}"),
            &["chat_template.jinja"],
        );
    }
    assert_refused(
        "{% import 'chat_template.jinja' as all %}",
        &["chat_template.jinja"],
    );
}

/// A conversation of 1,000 messages stays within the limits.
#[test]
fn template_renders_a_long_conversation() {
    let source = "{{ bos_token }}{% set ns = namespace(last=-1, texts=[]) %}\
        {% for i in range(messages | length) %}{% if messages[i]['role'] == 'user' %}{% set ns.last = i %}{% endif %}{% endfor %}\
        {% for message in messages %}{% set seen = namespace(found=false) %}\
        {% for j in range(loop.index0 - 1, -1, -1) %}{% if not seen.found and messages[j]['role'] != 'tool' %}\
        {% set seen.found = true %}{% endif %}{% endfor %}\
        {% set ns.texts = ns.texts + [message['content'] | trim] %}\
        {{ '<|turn>' + message['role'] + '\\n' + message['content'] + '<turn|>\\n' }}{% endfor %}{{ ns.texts | length }}";
    let template = ChatTemplate::from_source(source).expect("the template is valid");
    let messages: Vec<Message> = (0..1000)
        .map(|index| match index % 2 {
            0 => Message::user("word ".repeat(1000)),
            _ => Message::assistant("word ".repeat(1000)),
        })
        .collect();
    let prompt = template.render(&messages, ChatOptions::default());
    let prompt = prompt.expect("the prompt is valid");
    assert!(prompt.len() > 5_000_000 && prompt.ends_with("1000"));
    assert_eq!(prompt.matches("<|turn>").count(), 1000);
}

struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary folder"))
    }

    fn write(&self, name: &str, contents: &str) {
        fs::write(self.0.path().join(name), contents).expect("the file is writable");
    }

    fn config(&self, config: &Value) {
        self.write("tokenizer_config.json", &config.to_string());
    }

    fn template(&self) -> Result<ChatTemplate, Gemma4Error> {
        ChatTemplate::from_folder(self.0.path())
    }

    #[track_caller]
    fn rendered(&self) -> String {
        let rendered = self.template().and_then(|template| render(&template));
        rendered.unwrap_or_else(|error| panic!("{error}"))
    }
}

#[test]
fn template_of_tokenizer_config_is_used() {
    let folder = Folder::new();
    assert_eq!(
        folder.rendered(),
        "<bos><|turn>user\nhi<turn|>\n<|turn>model\n"
    );
    folder.config(&json!({"tokenizer_class": "GemmaTokenizer"}));
    assert_eq!(
        folder.rendered(),
        "<bos><|turn>user\nhi<turn|>\n<|turn>model\n"
    );
    folder.config(&json!({"chat_template": "one {{ messages[0].content }}"}));
    assert_eq!(folder.rendered(), "one hi");
    let named = |names: &[&str]| {
        let list: Vec<Value> = names
            .iter()
            .map(|name| json!({"name": name, "template": format!("{name} {{{{ messages[0].content }}}}")}))
            .collect();
        json!({"chat_template": list})
    };
    folder.config(&named(&["tool_use", "default", "rag"]));
    assert_eq!(folder.rendered(), "default hi");
    folder.config(&named(&["tool_use", "rag"]));
    let template = folder
        .template()
        .expect("the folder loads without a default template");
    let error = render(&template)
        .expect_err("no template is the default")
        .to_string();
    for word in ["rag", "tool_use", "default", "tokenizer_config.json"] {
        assert!(error.contains(word), "{error}");
    }
    // The template in `chat_template.jinja` takes precedence over the template in `tokenizer_config.json`.
    folder.write("chat_template.jinja", "file");
    assert_eq!(folder.rendered(), "file");
}

/// The templates have the same precedence as in Hugging Face Transformers' processors: `processor_config.json`,
/// `chat_template.json`, then the files of the tokenizer.
#[test]
fn template_of_a_processor_takes_precedence_over_the_tokenizers() {
    let folder = Folder::new();
    folder.config(&json!({"chat_template": "tokenizer"}));
    folder.write(
        "processor_config.json",
        r#"{"processor_class": "Gemma4Processor"}"#,
    );
    assert_eq!(folder.rendered(), "tokenizer");
    folder.write("chat_template.jinja", "jinja");
    assert_eq!(folder.rendered(), "jinja");
    let of_json = json!({"chat_template": "json {{ messages[0].content }}"});
    folder.write("chat_template.json", &of_json.to_string());
    assert_eq!(folder.rendered(), "json hi");
    folder.write("processor_config.json", r#"{"chat_template": "processor"}"#);
    assert_eq!(folder.rendered(), "processor");
    folder.write(
        "processor_config.json",
        r#"{"chat_template": {"rag": "rag"}}"#,
    );
    let error = render(&folder.template().expect("the template is valid"))
        .expect_err("no template is the default");
    assert!(
        error.to_string().contains("processor_config.json"),
        "{error}"
    );
    folder.write("processor_config.json", "{}");
    folder.write("chat_template.json", r#"{"chat_template": 3}"#);
    let error = folder
        .template()
        .expect_err("the template is a number")
        .to_string();
    assert!(
        error.contains("chat_template.json: chat_template: chat_template should be"),
        "{error}"
    );
}

#[test]
fn template_special_tokens_are_those_of_tokenizer_config() {
    let folder = Folder::new();
    folder.config(&json!({
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "lstrip": false},
        "pad_token": null,
        "my_token": "<mine>",
        "chat_template": "{{ bos_token }}{{ eos_token }}{{ my_token }}{{ sot_token }}",
    }));
    assert_eq!(folder.rendered(), "<s></s><mine><|turn>");
}

#[test]
fn template_of_malformed_tokenizer_config_is_refused() {
    for (contents, word) in [
        ("", "EOF"),
        ("[1]", "invalid"),
        (r#"{"chat_template": 3}"#, "chat_template should be"),
        (
            r#"{"chat_template": [{"name": "default"}]}"#,
            "chat_template should be",
        ),
        (r#"{"chat_template": "{% if"}"#, "syntax error"),
    ] {
        let folder = Folder::new();
        folder.write("tokenizer_config.json", contents);
        let error = folder.template().expect_err(contents);
        assert!(matches!(error, Gemma4Error::Malformed { .. }), "{error:?}");
        let error = error.to_string();
        assert!(
            error.contains("tokenizer_config.json") && error.contains(word),
            "{error}"
        );
    }
}

/// A template with a long chain of operators is refused before it is parsed. The chain would overflow the stack of the
/// parser, or take quadratic time in the parser.
#[test]
fn template_with_a_long_chain_is_refused_before_it_is_parsed() {
    let chain =
        |operator: &str, count: usize| format!("{{{{ {} }}}}", vec!["a"; count].join(operator));
    for operator in [
        "~",
        " + ",
        " or ",
        ".",
        " | upper | ",
        " if a else ",
        " == ",
    ] {
        assert_refused(&chain(operator, 50_000), &["operators"]);
    }
    assert_refused(
        &format!("{{{{ {}a }}}}", "not ".repeat(100_000)),
        &["operators"],
    );
    let branches = "{% elif 0 %}b".repeat(10_000);
    assert_refused(&format!("{{% if 0 %}}a{branches}{{% endif %}}"), &["elif"]);
    assert_refused(&"{% if 1 %}".repeat(50_000), &["chat_template.jinja"]);
    assert_refused(&"a".repeat(2 << 20), &["bytes"]);
    let deep = chain("~", 900);
    assert_eq!(
        render(&ChatTemplate::from_source(&deep).expect("the template is valid"))
            .expect("the prompt is valid"),
        ""
    );
}

/// A single instruction of a template may read 30 MB, so a limit on the number of instructions does not bound the time. The
/// time limit must therefore end such a template.
#[test]
fn template_that_reads_long_texts_without_end_is_refused_in_time() {
    let long = "{% set s = messages[0]['content'] * 15000000 %}{% set t = messages[0]['content'] * 15000000 %}";
    for step in ["{% if 'b' in s %}{% endif %}", "{% if s == t %}{% endif %}"] {
        let looped = format!(
            "{long}{{% for i in range(100000) %}}{{% for j in range(100) %}}{step}{{% endfor %}}{{% endfor %}}"
        );
        assert_refused(&looped, &["more than 10 s"]);
    }
}

/// For the parser, each `elif` is nested one level deeper than the branch before it. The levels of all surrounding `if`
/// chains count too. A template with too many levels is refused.
#[test]
fn template_with_nested_chains_of_branches_is_refused() {
    for (begin, end) in [("", ""), ("{% for x in [1] %}", "{% endfor %}")] {
        let branches = format!("{begin}{{% if 0 %}}{}", "{% elif 0 %}".repeat(299));
        let source = branches.repeat(70) + &format!("{{% endif %}}{end}").repeat(70);
        assert_refused(&source, &["elif"]);
    }
}

/// A template without a loop can also exceed the time limit. An instruction may read a whole text, and a filter may
/// process many elements. The limit is therefore checked between such instructions and between such elements.
#[test]
fn template_that_reads_long_texts_without_a_loop_is_refused_in_time() {
    let long = "{% set s = messages[0]['content'] * 15000000 %}";
    for step in ["s[29999999]", "s[29999998:]"] {
        let steps = format!("{{% if {step} %}}{{% endif %}}").repeat(20_000);
        assert_refused(&(long.to_owned() + &steps), &["more than 10 s"]);
    }
    for step in [
        "(['b'] * 100000) | select('in', s) | list",
        "([{'a': 'b'}] * 100000) | selectattr('a', 'in', s) | list",
        "(['b'] * 100000) | map('trim', s) | list",
    ] {
        assert_refused(
            &format!("{long}{{{{ {step} | length }}}}"),
            &["more than 10 s"],
        );
    }
}
