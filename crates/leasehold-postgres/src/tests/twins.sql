-- Makes twins in public of what the statements in public.called call.
SET client_min_messages = warning;
SET search_path = pg_catalog;
CREATE FUNCTION public.evil_check() RETURNS bool LANGUAGE plpgsql AS $$ BEGIN
    RAISE EXCEPTION 'a stranger''s code ran: a type or a table'; END $$;

DO $plant$
DECLARE
    called text[] := (SELECT array_agg(name) FROM public.called);
    usual text[] := '{text,int4,int8,numeric,bytea,bool,timestamptz,name,oid,float8}';
    few text[] := '{text,int4,int8,bytea,bool,numeric}';
    body text := $$ LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''a stranger''''s code ran: a function''; END' $$;
    r record;
    l text;
    m text;
    n text;
    made int;
BEGIN
    -- Operators.
    FOR r IN SELECT DISTINCT oprname::text AS name FROM pg_operator WHERE oprname = ANY (called) AND oprkind = 'b' LOOP
        FOREACH l IN ARRAY usual LOOP FOREACH m IN ARRAY usual LOOP
            SELECT coalesce(
                (SELECT format_type(oprresult, NULL) FROM pg_operator WHERE oprname = r.name AND oprkind = 'b'
                    AND oprleft = l::regtype AND oprright = m::regtype AND oprnamespace = 'pg_catalog'::regnamespace),
                CASE WHEN NOT EXISTS (SELECT FROM pg_operator WHERE oprname = r.name AND oprresult <> 'bool'::regtype)
                        THEN 'bool'
                    WHEN 'numeric' = ANY (ARRAY[l, m]) THEN 'numeric' WHEN 'text' = ANY (ARRAY[l, m]) THEN 'text'
                    ELSE l END) INTO n;
            BEGIN
                EXECUTE format('CREATE FUNCTION public.evil_%s(%s, %s) RETURNS %s %s',
                    translate(n, ' ', '_'), l, m, n, body);
            EXCEPTION WHEN duplicate_function THEN NULL; END;
            EXECUTE format('CREATE OPERATOR public.%s (leftarg = %s, rightarg = %s, function = public.evil_%s)',
                r.name, l, m, translate(n, ' ', '_'));
        END LOOP; END LOOP;
    END LOOP;
    -- Functions with the same arguments.
    FOR r IN SELECT p.*, format_type(prorettype, NULL) AS result,
            (SELECT coalesce(string_agg(format_type(t, NULL), ', ' ORDER BY o), '')
                FROM unnest(proargtypes::oid[]) WITH ORDINALITY AS a (t, o)) AS args
        FROM pg_proc AS p WHERE pronamespace = 'pg_catalog'::regnamespace AND proname = ANY (called) LOOP
        BEGIN
            IF r.prokind = 'a' THEN
                EXECUTE format('CREATE FUNCTION public.evil_agg_%s(int8%s) RETURNS int8 %s', r.proname,
                    CASE r.args WHEN '' THEN '' ELSE ', ' || r.args END, body);
                EXECUTE format('CREATE AGGREGATE public.%I(%s) (sfunc = public.evil_agg_%s, stype = int8, initcond = 0)',
                    r.proname, CASE r.args WHEN '' THEN '*' ELSE r.args END, r.proname);
            ELSE
                EXECUTE format('CREATE FUNCTION public.%I(%s) RETURNS %s %s %s', r.proname, r.args,
                    CASE WHEN r.proretset THEN 'SETOF' ELSE '' END, r.result, body);
            END IF;
        EXCEPTION WHEN OTHERS THEN NULL; END;
    END LOOP;
    -- With as many arguments of other types: an exact match counts more than the schema's place in the path.
    FOR r IN SELECT DISTINCT ON (proname, pronargs) proname, pronargs, proretset, provariadic, format_type(prorettype, NULL) AS result
        FROM pg_proc WHERE pronamespace = 'pg_catalog'::regnamespace AND proname = ANY (called) AND prokind = 'f'
            AND prorettype NOT IN ('internal'::regtype, 'cstring'::regtype, 'trigger'::regtype) LOOP
        IF r.pronargs = 1 OR r.provariadic <> 0 THEN
            FOREACH l IN ARRAY usual || '{text[],int8[],bytea[],name[]}'::text[] LOOP
                BEGIN
                    n := CASE r.result WHEN 'anyelement' THEN translate(l, '[]', '') ELSE r.result END;
                    EXECUTE format('CREATE FUNCTION public.%I(%s) RETURNS %s %s %s', r.proname, l,
                        CASE WHEN r.proretset THEN 'SETOF' ELSE '' END, n, body);
                EXCEPTION WHEN OTHERS THEN NULL; END;
            END LOOP;
        END IF;
        IF r.pronargs = 2 OR r.provariadic <> 0 THEN
            FOREACH l IN ARRAY few LOOP FOREACH m IN ARRAY few LOOP
                BEGIN
                    EXECUTE format('CREATE FUNCTION public.%I(%s, %s) RETURNS %s %s', r.proname, l, m, r.result, body);
                EXCEPTION WHEN OTHERS THEN NULL; END;
            END LOOP; END LOOP;
        END IF;
        IF r.pronargs = 3 THEN
            FOREACH l IN ARRAY few LOOP FOREACH m IN ARRAY few LOOP FOREACH n IN ARRAY few LOOP
                BEGIN
                    EXECUTE format('CREATE FUNCTION public.%I(%s, %s, %s) RETURNS %s %s', r.proname, l, m, n, r.result, body);
                EXCEPTION WHEN OTHERS THEN NULL; END;
            END LOOP; END LOOP; END LOOP;
        END IF;
    END LOOP;
    -- Tables, before the types that have their names.
    FOR r IN SELECT relname FROM pg_class WHERE relnamespace = 'pg_catalog'::regnamespace AND relkind IN ('r', 'v')
            AND relname = ANY (called) LOOP
        EXECUTE format('CREATE VIEW public.%I AS SELECT t.* FROM pg_catalog.%I AS t WHERE public.evil_check()', r.relname, r.relname);
        EXECUTE format('GRANT SELECT ON public.%I TO PUBLIC', r.relname);
    END LOOP;
    FOR r IN SELECT typname FROM pg_type WHERE typnamespace = 'pg_catalog'::regnamespace AND typtype = 'b' AND typrelid = 0
            AND typname = ANY (called) LOOP
        BEGIN
            EXECUTE format('CREATE DOMAIN public.%I AS pg_catalog.%I CHECK (public.evil_check())', r.typname, r.typname);
        EXCEPTION WHEN OTHERS THEN NULL; END;
    END LOOP;
    SELECT count(DISTINCT proname) INTO made FROM pg_proc WHERE pronamespace = 'public'::regnamespace;
    IF made < 20 THEN RAISE EXCEPTION 'only % functions have twins', made; END IF;
    SELECT count(DISTINCT oprname) INTO made FROM pg_operator WHERE oprnamespace = 'public'::regnamespace;
    IF made < 8 THEN RAISE EXCEPTION 'only % operators have twins', made; END IF;
END $plant$;
DROP TABLE public.called;
